"""The viewer in a real browser: every screen, hostile content, keyboard, phone, and a growing run."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import uvicorn
from training.conftest import CommandLine, wait_until, write_random_policy
from viewer.conftest import TOKEN
from viewer.made_evaluation import better, made_evaluation, written
from viewer.made_run import HOSTILE, make_run, metrics_row

from agentrl.telemetry.alerts import Alert
from agentrl.telemetry.metrics import METRICS
from agentrl.telemetry.run_directory import RunDirectory
from agentrl.telemetry.tokens import read_step
from agentrl.viewer.app import STATIC, make_app
from agentrl.viewer.export import export_run_page
from agentrl.viewer.runs import RunLibrary
from agentrl.viewer.serve import CalculationClient, open_local_listener
from agentrl.viewer.what_if import compute_what_if, recompute_advantages

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
HERE = CHROMIUM is not None or os.environ.get("CI") == "true"  # in CI there must be one
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not HERE, reason="no chromium here")]

if TYPE_CHECKING:
    from playwright import sync_api
    from playwright.sync_api import Page, expect
else:
    sync_api = pytest.importorskip("playwright.sync_api")
    expect = sync_api.expect
DEADLINE = 120_000  # milliseconds, for a machine that is busy
LONG_LINE = "x" * 100_000


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Serve ``folder`` in a thread, and yield the address."""
    listener = open_local_listener(None)
    calculator = CalculationClient()
    app = make_app(RunLibrary([folder]), token=TOKEN, calculate=calculator.request)
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="error", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/?token={TOKEN}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
        calculator.close()


@pytest.fixture(scope="module")
def browser() -> Iterator[sync_api.Browser]:
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def address(run: RunDirectory) -> Iterator[str]:
    with serving(run.path.parent) as url:
        yield url


@pytest.fixture
def page(browser: sync_api.Browser) -> Iterator[Page]:
    """Open a page, and fail if a script raises or violates the security policy."""
    yield from pages(browser)


@pytest.fixture
def phone(browser: sync_api.Browser) -> Iterator[Page]:
    yield from pages(browser, viewport={"width": 390, "height": 800}, color_scheme="dark")


def pages(browser: sync_api.Browser, **options: Any) -> Iterator[Page]:
    context = browser.new_context(**options)
    opened = context.new_page()
    opened.set_default_timeout(DEADLINE)
    expect.set_options(timeout=DEADLINE)
    wrong: list[str] = []
    opened.on("pageerror", lambda error: wrong.append(str(error)))
    opened.on("console", lambda message: wrong.append(message.text) if "Content Security" in message.text else None)
    opened.on("dialog", lambda dialog: wrong.append(dialog.message) or dialog.dismiss())
    yield opened
    context.close()
    assert wrong == []


def open_tokens(page: Page, address: str, number: int = 0) -> None:
    """Navigate from the table of runs to a trajectory."""
    page.goto(address)
    page.get_by_role("link", name="first").click()
    page.get_by_role("link", name="newest step").click()
    page.get_by_role("link", name=f"3 / {number}", exact=True).click()
    expect(page.get_by_role("heading", name=f"Trajectory {number} of step 3")).to_be_visible()


def test_the_tree_of_a_forked_rollout_leads_to_its_tokens(
    browser: sync_api.Browser, page: Page, tmp_path: Path
) -> None:
    make_run(tmp_path / "first", forked=True)
    with serving(tmp_path) as address:
        open_tokens(page, address, number=1)
        tree = page.locator("svg.tree")
        expect(tree.locator("a")).to_have_count(4)
        expect(tree.locator("a.here")).to_have_attribute("aria-label", re.compile("^Branch 1: G 0.000 · b "))
        expect(tree.get_by_text("weight 0.333, stopped, reward 0")).to_have_count(2)
        tree.locator("a").nth(3).locator("text").first.click()
        expect(page.get_by_role("heading", name="Trajectory 3 of step 3")).to_be_visible()
        page.get_by_role("link", name="toy-0", exact=True).click()
        expect(page.get_by_role("button", name="posterior of success")).to_be_visible()


def click_in(chart: sync_api.Locator, share: float, to: float | None = None) -> None:
    """Click in a chart at a fraction of its width, or drag from there to another fraction."""
    expect(chart.locator(".plot")).to_be_visible()
    rectangle = "({x, y, width, height}) => [x, y, width, height]"
    x, y, width, height = chart.evaluate(
        f"chart => ({rectangle})(chart.querySelector('.plot').getBoundingClientRect())"
    )
    mouse = chart.page.mouse
    mouse.move(x + share * width, y + height / 2)
    mouse.down()
    mouse.move(x + (share if to is None else to) * width, y + height / 2, steps=3)
    mouse.up()


def test_runs_and_curves(page: Page, address: str) -> None:
    page.goto(address)
    expect(page.get_by_role("row", name="first")).to_contain_text("tir_otb")
    expect(page.locator(".chart path.line").first).to_be_visible()
    page.get_by_label("Metric").select_option("policy/entropy")
    page.get_by_label("Search runs").fill("nothing like this")
    expect(page.get_by_text("0 of 1 runs")).to_be_visible()


def test_a_run_shows_its_panels_and_alerts_and_a_point_opens_its_step(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("link", name="first").press("Enter")
    expect(page.locator("main")).to_be_focused()
    for title in ("Reward", "Entropy", "Gradient norm", "How trajectories ended", "Time per step"):
        expect(page.get_by_role("heading", name=title, exact=True)).to_be_visible()
    entropy = page.locator(".card", has=page.get_by_role("heading", name="Entropy", exact=True))
    entropy.get_by_text("Definition").click()
    expect(entropy.get_by_text(METRICS["policy/entropy"].meaning)).to_contain_text("Healthy: falls slowly.")
    expect(entropy.locator("svg .unit").first).to_have_text("nats/token")
    expect(page.locator(".alert", has_text="entropy collapse · step 2")).to_be_visible()
    click_in(page.locator(".chart").first, 0.5)
    expect(page.get_by_role("heading", name="Step 2 of first")).to_be_visible()


def test_filters_and_search_find_rows(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("link", name="first").click()
    page.get_by_role("link", name="all 3 steps").click()
    expect(page.locator("tbody tr")).to_have_count(24)
    page.get_by_label("Text in the conversation").fill("BOXED{6}")
    page.get_by_label("From step").fill("2")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(4)
    page.get_by_role("button", name="Trajectory").dblclick()
    expect(page.locator("tbody tr").first).to_contain_text("3 / 5")


def test_one_problem_is_followed_over_the_steps(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("link", name="first").click()
    page.get_by_role("link", name="newest step").click()
    page.get_by_role("link", name="toy-1").first.click()
    expect(page.get_by_role("heading", name="This problem over the steps")).to_be_visible()
    expect(page.locator("tbody tr")).to_have_count(12)
    click_in(page.locator(".chart").first, 0.5)
    expect(page.get_by_role("heading", name="of step 2")).to_be_visible()


def test_rows_that_are_no_data_and_dropped_ones_say_why(page: Page, address: str) -> None:
    page.goto(address)
    page.get_by_role("link", name="first").click()
    page.get_by_role("link", name="all 3 steps").click()
    page.get_by_text("More filters").click()
    page.get_by_label("Not trained because").select_option("void turn")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(6)
    page.get_by_role("link", name="1 / 2", exact=True).click()
    expect(page.get_by_text("The step did not train on this trajectory: void turn.")).to_be_visible()
    expect(page.get_by_role("button", name="Choose an estimator")).to_have_count(0)


def test_a_token_shows_the_values_that_training_used(page: Page, address: str, run: RunDirectory) -> None:
    open_tokens(page, address)
    item = read_step(run, 3).trajectories[0]
    assert item.tokens is not None
    page.locator("[data-index='4']").hover()
    for name in ("advantages", "baselines", "returns", "energy", "log_probs"):
        shown = page.locator(f"[data-field={name}] td").get_attribute("title")
        assert float(shown) == float(getattr(item.tokens, name)[4]), name
    page.locator("[data-index='4']").click()
    page.keyboard.press("ArrowRight")
    expect(page.locator("[data-index='5']")).to_have_class("current")
    page.keyboard.press("End")
    expect(page.locator("[data-index].current")).to_have_attribute("data-index", str(len(item.tokens) - 1))
    page.keyboard.press("Home")
    expect(page.locator("[data-index='0']")).to_have_class("current")
    page.get_by_label("Color by").select_option("energy")
    page.get_by_role("button", name="Largest").click()
    largest = int(item.tokens.energy.argmax())
    expect(page.locator(f"[data-index='{largest}']")).to_have_class("current")
    expect(page.locator("i.special").last).to_have_text("<|endoftext|>")
    expect(page.locator(".siblings article")).to_have_count(4)
    page.locator(".chart").first.scroll_into_view_if_needed()
    expect(page.locator(".chart path.line").first).to_be_visible()


def test_each_part_of_the_reward_is_shown_without_its_weight(page: Page, address: str) -> None:
    open_tokens(page, address)
    part = page.locator("dl.facts div", has_text="Reward function shorter")
    expect(part.locator("dd")).to_have_text("-2.500 before its weight")


def test_another_estimator_is_computed_on_the_spot(page: Page, address: str, run: RunDirectory) -> None:
    open_tokens(page, address)
    page.get_by_role("button", name="Choose an estimator").click()
    page.get_by_label("tail").select_option("self")
    page.get_by_label("leave one out").select_option("true")
    page.get_by_label("N: rollouts").select_option("2")
    page.get_by_role("button", name="Compute").click()
    step = read_step(run, 3)
    found = compute_what_if(
        step, step.trajectories[0], estimator="tir_otb", options={"tail": "self", "leave_one_out": True}, size=2
    )
    expect(page.locator("[data-power]")).to_have_attribute("data-power", str(found.power))
    page.locator("[data-index='4']").hover()
    shown = page.locator("[data-field=what_if_advantages] td").get_attribute("title")
    assert float(shown) == float(found.columns[step.trajectories[0].key]["advantages"][4])
    page.get_by_role("button", name="Explain the gradient").click()
    expect(page.locator(".panel pre")).to_contain_text(
        "compute_advantages on the stored statistics returns the same value"
    )


def test_an_exported_page_works_from_a_file_without_a_network(page: Page, run: RunDirectory, tmp_path: Path) -> None:
    out = tmp_path / "page.html"
    export_run_page(run, out, steps=[2, 3])
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.context.set_offline(True)
    page.goto(out.as_uri())
    expect(page.get_by_role("heading", name="first", exact=True)).to_be_visible()  # the run's page, not a list of one
    expect(page.locator(".chart path.line").first).to_be_visible()
    page.get_by_role("link", name="all 2 steps").click()
    expect(page.locator("tbody tr")).to_have_count(16)
    page.get_by_label("Text in the conversation").fill("BOXED{6}")
    page.get_by_label("From step").fill("3")
    page.get_by_role("button", name="Search", exact=True).click()
    expect(page.locator("tbody tr")).to_have_count(2)
    page.get_by_role("link", name="3 / 1", exact=True).click()
    page.locator("[data-index='4']").hover()
    item = read_step(run, 3).trajectories[1]
    assert item.tokens is not None
    assert float(page.locator("[data-field=advantages] td").get_attribute("title")) == float(item.tokens.advantages[4])
    assert HOSTILE.replace("\u202e", "‹U+202E›") in page.locator(".siblings pre").first.inner_text()
    assert page.locator("main script, main img, main a[href^='javascript']").count() == 0
    expect(page.get_by_role("button", name="Choose an estimator")).to_have_count(0)
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []


def test_evaluations_are_read_and_compared(page: Page, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as elsewhere:  # Playwright runs an event loop in this thread
        for name, write in (("plain", written), ("better", better)):
            elsewhere.submit(made_evaluation, tmp_path / "runs" / name, write).result()
    with serving(tmp_path / "runs") as url:
        page.goto(url)
        page.get_by_role("link", name="plain").click()
        expect(page.get_by_role("heading", name="pass@k")).to_be_visible()
        expect(page.locator(".chart path.line").first).to_be_visible()
        page.get_by_role("combobox", name="Outcome").select_option("incorrect")
        page.get_by_role("button", name="Search", exact=True).click()
        expect(page.get_by_text("2 problems, 4 of 8 rollouts")).to_be_visible()
        page.get_by_label("Compare with").select_option("better")
        expect(page.get_by_role("heading", name="better against plain")).to_be_visible()
        expect(page.get_by_role("row", name="toy").first).to_contain_text("+0.25")
        page.get_by_role("link", name="4 of 4").click()
        expect(page.get_by_text("1 problems, 4 of 8 rollouts")).to_be_visible()
        page.locator("td a.cell").first.click()
        expect(page.locator(".segment.model")).to_contain_text("<img src=x onerror=alert(1)>")


def test_contents_are_text_and_never_markup(page: Page, address: str) -> None:
    open_tokens(page, address, number=1)
    said = page.locator(".siblings pre").first.inner_text()
    assert HOSTILE.replace("\u202e", "‹U+202E›") in said
    assert page.locator("main script, main img, main a[href^='javascript']").count() == 0
    assert "‹U+202E›" in page.locator(".segment.model").first.inner_text()


@pytest.mark.parametrize("screen", ["", "#/run/ID", "#/run/ID/trajectories?first=3&last=3", "#/run/ID/3/1"])
def test_no_screen_of_a_phone_scrolls_sideways(phone: Page, address: str, run: RunDirectory, screen: str) -> None:
    (place,) = RunLibrary([run.path]).folders()
    phone.goto(address)
    expect(phone.get_by_role("row", name="first")).to_be_visible()
    target = screen.replace("ID", place.id)
    phone.goto(address + target)
    expect(phone.locator("main")).to_have_attribute("data-ready", target)
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_phone_in_the_dark_needs_no_sideways_scrolling(phone: Page, address: str) -> None:
    open_tokens(phone, address)
    phone.locator(".chart").first.scroll_into_view_if_needed()
    expect(phone.locator(".chart path.line").first).to_be_visible()
    assert phone.evaluate("document.documentElement.scrollWidth") <= 390
    dark = phone.evaluate("getComputedStyle(document.body).backgroundColor")
    assert max(int(part) for part in dark.removeprefix("rgb(").removesuffix(")").split(",")) < 64


def test_curves_grow_while_the_run_writes(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first", steps=2)
    with serving(run.path.parent) as url:
        page.goto(url)
        page.get_by_role("link", name="first").click()
        expect(page.locator(".facts")).to_contain_text("Last step2")
        run.append_metrics(metrics_row(3, np.random.default_rng(1)))
        expect(page.locator(".facts")).to_contain_text("Last step3")


def test_a_training_run_is_followed_and_its_tokens_have_the_advantages_of_training(page: Page, tmp_path: Path) -> None:
    write_random_policy(tmp_path)
    command_line = CommandLine(tmp_path)
    arguments = command_line.counting(tmp_path / "policy", "name=live", "training.steps=8", "evaluation.every=9")
    process = command_line.start(*arguments)
    try:
        wait_until(lambda: bool(command_line.steps("live")), process)
        os.killpg(process.pid, signal.SIGSTOP)
        steps = command_line.steps("live")[-1]
        assert steps < 8
        with serving(tmp_path / "runs") as url:
            page.goto(url)
            page.get_by_role("link", name="live").click()
            expect(page.locator(".facts")).to_contain_text(f"Last step{steps}")
            os.killpg(process.pid, signal.SIGCONT)
            expect(page.locator(".facts")).to_contain_text("Last step8")
            said = process.communicate()[0]
            assert process.returncode == 0, said
            page.get_by_role("link", name="newest step").click()
            page.get_by_role("link", name="8 / 0", exact=True).click()
            page.locator("[data-index='2']").hover()
            shown = page.locator("[data-field=advantages] td").get_attribute("title")
    finally:
        command_line.close()
    step = read_step(RunDirectory(tmp_path / "runs" / "live"), 8)
    item = step.trajectories[0]
    assert float(shown) == float(recompute_advantages(step, step.trained_group(item))[item.key]["advantages"][2])


def test_a_long_table_is_shown_in_parts(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first", steps=1, groups=40, size=8)
    with serving(run.path.parent) as url:
        page.goto(url)
        page.get_by_role("link", name="first").click()
        page.get_by_role("link", name="newest step").click()
        expect(page.locator("tbody tr")).to_have_count(250)
        page.get_by_role("button", name="Show more: 250 of 320 rows are shown").click()
        expect(page.locator("tbody tr")).to_have_count(320)


def test_a_line_of_a_hundred_thousand_characters_is_shown(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first", groups=1, size=2, said=LONG_LINE)
    with serving(run.path.parent) as url:
        open_tokens(page, url)
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
        assert page.locator(".tokens i").count() > 1_000


def test_what_went_wrong_is_one_message(page: Page, address: str) -> None:
    page.goto(address.partition("?")[0] + "?token=" + TOKEN + "#/run/gone")
    expect(page.get_by_role("alert")).to_have_text("the run gone does not exist: it was moved or deleted")


def test_a_constant_advantage_is_coloured_and_the_page_opens_with_a_field_that_varies(
    page: Page, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "runs" / "first", estimator="grpo")
    with serving(run.path.parent) as url:
        open_tokens(page, url)
        expect(page.get_by_label("Color by")).to_have_value("gradient_share")
        page.get_by_label("Color by").select_option("advantages")
        assert page.locator("[data-index='0']").evaluate("item => item.style.backgroundColor").startswith("rgb")
        shades = page.evaluate(
            """async () => {
                const { scaleOf } = await import("/static/tokens.js");
                const { low, shade } = scaleOf("advantages", [0.8, 1]);
                return [low, shade(0.8), shade(1), scaleOf("advantages", [0, 0]).shade(0)];
            }"""
        )
        assert shades == [0, "rgb(var(--up) / 0.600)", "rgb(var(--up) / 0.750)", ""]  # 0.75 times 0.8, and 0.75


def test_an_address_opens_the_same_token_and_copied_text_is_the_models(page: Page, address: str) -> None:
    open_tokens(page, address)
    page.get_by_label("Color by").select_option("energy")
    page.locator("[data-index='4']").click()
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**token=5*")
    sent = page.url
    page.goto("about:blank")
    page.goto(sent)
    expect(page.locator("[data-index='5']")).to_have_class("current")
    expect(page.get_by_label("Color by")).to_have_value("energy")
    copied = page.locator(".tokens").first.evaluate(
        "box => (getSelection().selectAllChildren(box), getSelection().toString())"
    )
    assert "```py\nprint(2 + 3)\n```" in copied
    assert "↵" not in copied


def test_runs_keep_their_colours_and_new_ones_appear(page: Page, run: RunDirectory, tmp_path: Path) -> None:
    for number in range(7):
        shutil.copytree(run.path, tmp_path / "runs" / f"run{number}")

    def colours() -> dict[str, str]:
        marks = page.locator("td.name").evaluate_all(
            "cells => cells.map(each => [each.querySelector('a').textContent,"
            " getComputedStyle(each.querySelector('.line-mark path')).stroke])"
        )
        return dict(marks)

    with serving(tmp_path / "runs") as url:
        page.goto(url)
        expect(page.locator("tbody tr").filter(has=page.get_by_role("checkbox"))).to_have_count(7)
        before = colours()
        shutil.copytree(run.path, tmp_path / "runs" / "another")
        expect(page.get_by_role("link", name="another")).to_be_visible()
        after = colours()
        assert len(set(after.values())) == 8
        assert {name: after[name] for name in before} == before
        page.get_by_label("Metric").select_option("policy/entropy")
        page.get_by_label("Over").select_option("hours")
        page.get_by_label("Search runs").fill("run3")
        page.wait_for_url("**search=run3*")
        page.goto("about:blank")
        page.go_back()
        expect(page.get_by_label("Metric")).to_have_value("policy/entropy")
        expect(page.get_by_label("Over")).to_have_value("hours")
        expect(page.get_by_text("1 of 8 runs")).to_be_visible()


def test_an_alert_that_follows_from_another_one_has_no_line_of_advice(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first", steps=1)
    run.append_alert(Alert(step=2, alert="no_signal", message="no group (follows from reward_collapse)", advice=""))
    with serving(run.path.parent) as url:
        page.goto(url)
        page.get_by_role("link", name="first").click()
        expect(page.locator(".alert")).to_have_count(2)
        expect(page.locator(".alert .advice")).to_have_text(["Advice explore more"])


def test_no_more_curves_are_drawn_than_have_a_look_of_their_own(page: Page, run: RunDirectory, tmp_path: Path) -> None:
    for number in range(17):
        shutil.copytree(run.path, tmp_path / "runs" / f"run{number:02}", ignore=shutil.ignore_patterns("tokens"))
    with serving(tmp_path / "runs") as url:
        chosen = "~".join(place.id for place in RunLibrary([tmp_path / "runs"]).folders())
        page.goto(f"{url}#/?runs={chosen}")
        expect(page.get_by_role("checkbox", disabled=True)).to_have_count(1)
        expect(page.get_by_role("checkbox", checked=True)).to_have_count(16)
        expect(page.get_by_text("At most 16 curves are shown")).to_be_visible()
        looks = page.locator(".chart path.line").evaluate_all(
            "lines => lines.map(({ style }) => style.stroke + style.strokeDasharray)"
        )
        assert len(set(looks)) == len(looks) == 16
        marks = page.locator("td.name .line-mark path").evaluate_all(
            "lines => lines.map(({ style }) => style.stroke + style.strokeDasharray)"
        )
        assert set(looks) == set(marks) - {"transparent"}


def test_a_long_run_draws_few_paths_and_its_charts_zoom_together(page: Page, tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "first", steps=1)
    draw = np.random.default_rng(0)
    rows = (json.dumps(metrics_row(step, draw)) for step in range(2, 5001))
    with run.metrics_file.open("a") as file:
        file.writelines(f"{row}\n" for row in rows)
    with serving(run.path.parent) as url:
        page.goto(url)
        page.get_by_role("link", name="first").click()
        expect(page.locator("main")).to_have_attribute("data-ready", re.compile("#/run/"))
        assert page.locator("svg path").count() < 200
        click_in(page.locator(".chart").first, 0.2, to=0.4)
        expect(page.get_by_role("button", name="Show all steps")).to_be_visible()
        for chart in page.locator(".chart").all():
            expect(chart.locator("svg text").filter(has_text="1,200")).to_have_count(1)
            expect(chart.locator("svg text").filter(has_text="4,000")).to_have_count(0)
        page.wait_for_url("**range=*")


def test_a_deleted_run_and_an_ended_viewer_are_said(page: Page, run: RunDirectory, tmp_path: Path) -> None:
    shutil.copytree(run.path, tmp_path / "runs" / "first")
    shutil.copytree(run.path, tmp_path / "runs" / "second")
    with serving(tmp_path / "runs") as url:
        page.goto(url)
        page.get_by_role("link", name="first").click()
        expect(page.get_by_role("heading", name="Entropy", exact=True)).to_be_visible()
        shutil.rmtree(tmp_path / "runs" / "first")
        expect(page.locator("#trouble")).to_contain_text("This page shows data from")
        page.get_by_role("link", name="Runs").click()
        expect(page.get_by_role("heading", name="Runs", exact=True)).to_be_visible()
        expect(page.locator("#trouble")).to_be_hidden()
    expect(page.locator("#trouble")).to_contain_text("The viewer does not respond: start `agentrl view` again.")


def test_a_phone_sees_scores_and_no_panel_covers_text(phone: Page, run: RunDirectory, tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as elsewhere:  # Playwright runs an event loop in this thread
        elsewhere.submit(made_evaluation, tmp_path / "runs" / "plain", written).result()
    shutil.copytree(run.path, tmp_path / "runs" / "first")
    with serving(tmp_path / "runs") as url:
        open_tokens(phone, url)
        expect(phone.locator(".panel")).to_be_hidden()
        phone.locator("[data-index='4']").click()
        phone.locator(".panel").evaluate("panel => panel.scrollTo(0, panel.scrollHeight)")
        close = phone.get_by_role("button", name="Close")
        assert close.bounding_box()["y"] >= phone.locator(".panel").bounding_box()["y"]
        close.click()
        expect(phone.locator(".panel")).to_be_hidden()
        phone.goto(url)
        phone.get_by_role("link", name="plain").click()
        box = phone.get_by_role("columnheader", name="Mean", exact=True).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390


def test_text_is_readable_on_tokens() -> None:
    style = (STATIC / "style.css").read_text(encoding="utf-8")
    light, dark = style.split("@media (prefers-color-scheme: dark)")[:2]
    for sheet in (light, dark.split("* {")[0]):
        ink, paper = (re.findall(rf"--{name}: #(\w+)", sheet)[0] for name in ("ink", "paper"))
        for name in ("up", "down"):
            strong = [int(part) for part in re.findall(rf"--{name}: (\d+) (\d+) (\d+)", sheet)[0]]
            under = [int(paper[place : place + 2], 16) for place in (0, 2, 4)]
            mixed = "".join(f"{round(0.75 * top + 0.25 * low):02x}" for top, low in zip(strong, under, strict=True))
            dim, bright = sorted(float(LUMINANCE @ _linear(each)) for each in (ink, mixed))
            assert (bright + 0.05) / (dim + 0.05) >= 4.5


LUMINANCE = np.array([0.2126, 0.7152, 0.0722])


def _linear(colour: str) -> np.ndarray:
    parts = np.array([int(colour[place : place + 2], 16) for place in (0, 2, 4)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
