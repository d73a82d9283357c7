// What the theme does not do: names for the buttons of code, and verdicts in colour.
"use strict";

// Each block of code has a bar with a button. Programs that read a page aloud need a name for each bar.
new MutationObserver(() => {
  for (const bar of document.querySelectorAll(".md-code__nav:not([aria-label])")) {
    bar.setAttribute("aria-label", `actions for ${bar.parentElement.id.replace("__", "").replace("_", " ")}`);
  }
}).observe(document.body, { childList: true, subtree: true });

// Columns of numbers are aligned on the right. The cells of a wide table have its titles: on a phone, site.css shows its
// rows below each other.
const NUMBER = /^[-−+]?\d[\d.,]*( ?%)?( ± \d[\d.]*)?$/; // all of a cell
for (const table of document.querySelectorAll("article table:not([class])")) {
  const titles = [...(table.tHead?.rows[0].cells ?? [])];
  for (const [column, title] of titles.entries()) {
    const cells = [...table.tBodies[0].rows].map((row) => row.cells[column]);
    const texts = cells.map((cell) => cell.textContent.trim()).filter(Boolean);
    const hasNumbers = texts.length && texts.every((text) => NUMBER.test(text));
    for (const cell of hasNumbers ? [title, ...cells] : []) cell.classList.add("number");
    const isWide = titles.length > 10 && !table.tHead.querySelector("math");
    for (const cell of isWide ? cells : []) cell.dataset.title = title.textContent;
  }
}

// A cell that scrolls, on a phone, can be reached with the keys.
for (const cell of document.querySelectorAll("article td")) if (cell.scrollWidth > cell.clientWidth) cell.tabIndex = 0;

// Colours the verdicts of the page of claims, and shows those rows alone that are asked for.
// The words are those of the page's own table of verdicts. A cell that begins with one of them is a verdict.
{ // the names stay in here: the site has scripts of its own
  const KINDS = [[/^(shows|holds)/, "yes"], [/^(the opposite|no effect)/, "no"], [/^too few/, "open"], [/./, "none"]];
  const firstWords = (row) => row.cells[0].textContent.trim();
  const tables = [...document.querySelectorAll("article table")];
  const key = tables.find((table) => firstWords(table.rows[0]) === "verdict");
  const words = key ? [...key.tBodies[0].rows].map(firstWords) : [];

  // Where a cell's verdict would be: the word in bold at its beginning, or all of the cell.
  const placeIn = (cell) => cell.querySelector(":scope > strong:first-child") ?? cell;
  const verdictOf = (cell) => words.find((word) => word === placeIn(cell).textContent.trim());
  const colour = (cell) =>
    placeIn(cell).classList.add("verdict", KINDS.find(([pattern]) => pattern.test(verdictOf(cell)))[1]);

  if (key) {
    const found = []; // {row, paper, verdict}
    for (const row of key.tBodies[0].rows) colour(row.cells[0]);
    for (const table of tables.filter((one) => one !== key)) {
      let heading = table.closest(".md-typeset__scrollwrap") ?? table;
      while (heading && heading.tagName !== "H2") heading = heading.previousElementSibling;
      const paper = heading ? heading.firstChild.textContent.trim() : "";
      for (const row of table.tBodies[0].rows) {
        const cell = [...row.cells].find(verdictOf);
        if (!cell) continue;
        colour(cell);
        found.push({ row, paper, verdict: verdictOf(cell) });
      }
    }
    const menu = (name, values) =>
      `<label>${name} <select><option value="">all</option>${values.map((one) => `<option>${one}</option>`).join("")}</select></label>`;
    const form = document.createElement("form");
    form.className = "ask";
    form.innerHTML = `${menu("Verdict", words)} ${menu("Paper", [...new Set(found.map((one) => one.paper))])} <span role="status"></span>`;
    const [verdicts, papers] = form.querySelectorAll("select");
    const filter = () => {
      for (const one of found) {
        one.row.hidden = ![["", one.verdict].includes(verdicts.value), ["", one.paper].includes(papers.value)].every(Boolean);
      }
      form.querySelector("span").textContent = `${found.filter((one) => !one.row.hidden).length} of ${found.length} claims`;
    };
    form.addEventListener("change", filter);
    filter();
    const place = key.closest(".md-typeset__scrollwrap") ?? key;
    place.after(form);
  }
}
