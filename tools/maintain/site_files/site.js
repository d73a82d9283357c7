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

// Colours the verdicts of the page of claims, and shows only the rows that are asked for. The words are those of the
// page's first table, the key. A cell that begins with one of them is a verdict.
{ // the names stay in here: the site has scripts of its own
  const KINDS = [[/^(shows|holds)/, "yes"], [/^(the opposite|no effect)/, "no"], [/^too few/, "open"], [/./, "none"]];
  const words = [], found = []; // verdicts, and rows: {row, paper, verdict}
  let paper, key;
  for (const node of document.querySelectorAll("article h2, article table")) {
    if (node.tagName === "H2") paper = node.firstChild.textContent.trim();
    const isKey = node.rows?.[0]?.cells[0].textContent.trim() === "verdict";
    if (isKey) key = node.closest(".md-typeset__scrollwrap") ?? node;
    for (const row of (key && node.tBodies?.[0].rows) ?? []) {
      // where a cell's verdict would be: the word in bold at its beginning, or all of the cell
      const places = [...row.cells].map((cell) => cell.querySelector(":scope > strong:first-child") ?? cell);
      if (isKey) words.push(places[0].textContent.trim());
      const place = places.find((one) => words.includes(one.textContent.trim()));
      const verdict = place?.textContent.trim();
      place?.classList.add("verdict", KINDS.find(([pattern]) => pattern.test(verdict))[1]);
      if (place && !isKey) found.push({ row, paper, verdict });
    }
  }
  const menu = (name, values) => {
    const options = values.map((value) => `<option>${value}</option>`);
    return `<label>${name} <select><option value="">all</option>${options.join("")}</select></label>`;
  };
  const form = document.createElement("form");
  form.className = "ask";
  form.innerHTML = `${menu("Verdict", words)} ${menu("Paper", [...new Set(found.map((one) => one.paper))])} <span role="status"></span>`;
  const [verdicts, papers] = form.querySelectorAll("select");
  const filter = () => {
    for (const { row, paper, verdict } of found) {
      row.hidden = (verdicts.value && verdicts.value !== verdict) || (papers.value && papers.value !== paper);
    }
    form.querySelector("span").textContent = `${found.filter(({ row }) => !row.hidden).length} of ${found.length} claims`;
  };
  form.addEventListener("change", filter);
  filter();
  key?.after(form);
}
