// What the theme does not do: columns of numbers on the right, and verdicts in colour.
"use strict";

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
