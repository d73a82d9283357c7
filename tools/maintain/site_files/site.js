// What the theme does not do: columns of numbers on the right, verdicts in colour, and help for keys and readers aloud.
"use strict";

// Bars of code get a name, and boxes that scroll can be reached with the keys.
new MutationObserver(() => {
  for (const bar of document.querySelectorAll(".md-code__nav")) bar.ariaLabel = `actions for ${bar.parentElement.id}`;
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, article td, .d2h-file-side-diff, .d2h-file-diff")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}).observe(document.body, { childList: true, subtree: true });

const NUMBER = /^[-−+]?\d[\d.,]*( ?%)?( ± \d[\d.]*)?$/; // all of a cell
for (const table of document.querySelectorAll("article table:not([class])")) {
  for (const [column, title] of [...(table.tHead?.rows[0].cells ?? [])].entries()) {
    const cells = [...table.tBodies[0].rows].map((row) => row.cells[column]);
    const texts = cells.map((cell) => cell.textContent.trim()).filter(Boolean);
    const hasNumbers = texts.length && texts.every((text) => NUMBER.test(text));
    for (const cell of hasNumbers ? [title, ...cells] : []) cell.classList.add("number");
  }
}

// The verdicts of docs/claims.md: a cell, or the words in bold with which it begins.
const VERDICTS = { yes: /^(shows|holds)$/, no: /^(the opposite|no effect of that size)$/, open: /^too few runs to tell$/ };
for (const cell of document.querySelectorAll("article td")) {
  const place = cell.querySelector(":scope > strong:first-child") ?? cell;
  for (const [name, words] of Object.entries(VERDICTS)) {
    if (words.test(place.textContent.trim())) place.classList.add("verdict", name);
  }
}
