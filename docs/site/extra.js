// Makes scrollable elements accessible by keyboard, and labels the navigations for screen readers.
document$.subscribe(() => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    region.tabIndex = 0;
  }
  document.querySelectorAll(".md-code__nav").forEach((nav, index) => {
    nav.setAttribute("aria-label", `Code block ${index + 1}`);
  });
});

// The theme adds the version selector later. Its accessible name must contain the visible version.
new MutationObserver(() => {
  const button = document.querySelector(".md-version__current");
  button?.setAttribute("aria-label", `Version ${button.textContent.trim()}`);
}).observe(document.querySelector(".md-header__topic"), { childList: true, subtree: true });
