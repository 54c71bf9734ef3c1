// Keyboards reach what scrolls, and screen readers tell navigations apart.
document$.subscribe(() => {
  for (const region of document.querySelectorAll(".md-typeset__scrollwrap, .md-typeset pre > code")) {
    region.tabIndex = 0;
  }
  document.querySelectorAll(".md-code__nav").forEach((nav, index) => {
    nav.setAttribute("aria-label", `Code block ${index + 1}`);
  });
});
