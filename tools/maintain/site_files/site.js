// What the theme does not do: columns of numbers on the right, verdicts in colour, and help for keys and readers aloud.
"use strict";

// Bars of code get a name, and boxes that scroll can be reached with the keys.
new MutationObserver(() => {
  for (const bar of document.querySelectorAll(".md-code__nav")) bar.ariaLabel = `actions for ${bar.parentElement.id}`;
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap, article td, .formula, article :is(p:has(img), picture), .d2h-file-side-diff, .d2h-file-diff")) {
    if (box.scrollWidth > box.clientWidth) box.tabIndex = 0;
  }
}).observe(document.body, { childList: true, subtree: true });

// The cell above a column of names is empty: no title, for readers aloud.
for (const title of document.querySelectorAll("article th:empty")) title.replaceWith(document.createElement("td"));

const NUMBER = /^[-−+]?\d[\d.,]*( ?%)?( ± \d[\d.]*)?$/; // all of a cell
for (const table of document.querySelectorAll("article table:not([class])")) {
  for (const [column, title] of [...(table.tHead?.rows[0].cells ?? [])].entries()) {
    const cells = [...table.tBodies[0].rows].map((row) => row.cells[column]);
    for (const cell of cells) cell.dataset.label = title.textContent; // for phones, whose rows have no titles above
    const texts = cells.map((cell) => cell.textContent.trim()).filter(Boolean);
    const hasNumbers = texts.length && texts.every((text) => NUMBER.test(text));
    for (const cell of hasNumbers ? [title, ...cells] : []) cell.classList.add("number");
  }
}

// The verdicts of docs/claims.md: a cell, the words in bold with which it begins, or those of a finding.
const VERDICTS = { yes: /^(shows|holds)$/, no: /^(the opposite|no effect of that size)$/, open: /^too few runs to tell$/ };
for (const cell of document.querySelectorAll("article td, article li > strong")) {
  const place = cell.querySelector(":scope > strong:first-child") ?? cell;
  for (const [name, words] of Object.entries(VERDICTS)) {
    if (words.test(place.textContent.trim().replace(/\s+/g, " "))) place.classList.add("verdict", name);
  }
}

// The plots of docs/claims.md, which are text, as pictures: 25 places for the interval, its mean, 0 and what is claimed.
for (const code of document.querySelectorAll("article td > code")) {
  const text = code.textContent;
  if (!/^[·━●│◇]{25}$/.test(text)) continue;
  const at = (mark) => 6 * text.indexOf(mark) + 3;
  const [first, last] = [text.search(/[━●]/), text.length - 1 - [...text].reverse().join("").search(/[━●]/)];
  const claimed = text.includes("◇") ? `<path d="M${at("◇")} 3l5 6l-5 6l-5-6z" class="claimed"/>` : "";
  const zero = text.includes("│") ? `<path d="M${at("│")} 0v18"/>` : "";
  code.outerHTML = `<svg class="forest" role="img" aria-label="interval, see the numbers" viewBox="-4 0 158 18">${zero}` +
    `<path d="M${6 * first + 1} 9H${6 * last + 5}" class="interval"/>${claimed}<circle cx="${at("●")}" cy="9" r="4.5"/></svg>`;
}
