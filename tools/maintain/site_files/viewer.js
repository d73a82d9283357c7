// Shows any two scripts side by side. The address holds the state: #left=grpo&right=dapo&all=1.
// jsdiff finds what differs. LINES and SCRIPTS come from scripts.js, which tools/maintain/site.py writes.
"use strict";

const by = (id) => document.getElementById(id);
const FOLDED = ["module docstring", "imports", "Args"];
const COLUMNS = "<col class='number'><col><col class='number'><col>"; // a first row of one cell would set other widths
const CONTEXT = 4; // equal lines shown around a difference

// The state that the address holds, as far as it is one. On the left is the right script's parent, unless it says more.
function stateOf(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const known = (name, otherwise) => (Object.hasOwn(SCRIPTS, asked.get(name)) ? asked.get(name) : otherwise);
  const right = known("right", "grpo_ar_lopti");
  return { left: known("left", SCRIPTS[right].parent ?? "grpo"), right, code: asked.get("all") !== "1" };
}

function linesOf(name, code) {
  return SCRIPTS[name].lines.map(([at, section], i) => {
    const [text, html, bare] = LINES[at];
    const shown = code ? html.replace(/\s*<span class="c1">.*<\/span>$/, "") : html;
    return { name, number: i + 1, section, text: code ? bare : text, html: shown, isCode: bare !== "" };
  }).filter((line) => line.isCode || !code);
}

// [left line, right line] of a place that differs.
function paired(olds, news) {
  return Array.from({ length: Math.max(olds.length, news.length) }, (_, i) => [olds[i] ?? null, news[i] ?? null]);
}

function rowsOf({ left, right, code }) {
  const [olds, news] = [linesOf(left, code), linesOf(right, code)];
  const texts = (lines) => lines.map((line) => line.text);
  const rows = [];
  let [i, j, removed] = [0, 0, []];
  for (const part of [...Diff.diffArrays(texts(olds), texts(news)), { count: 0 }]) {
    if (part.removed) removed = olds.slice(i, (i += part.count));
    else if (part.added) rows.push(...paired(removed.splice(0), news.slice(j, (j += part.count))));
    else {
      rows.push(...removed.splice(0).map((old) => [old, null]));
      for (const end = i + part.count; i < end; i++, j++) rows.push([olds[i], news[j], "same"]);
    }
  }
  return rows;
}

function rangeOf(cell, from, to) {
  const [range, walker] = [new Range(), document.createTreeWalker(cell, NodeFilter.SHOW_TEXT)];
  for (let at = 0, node; from < to && (node = walker.nextNode()); at += node.length) {
    if (from >= at && from < at + node.length) range.setStart(node, from - at);
    if (to > at && to <= at + node.length) range.setEnd(node, to - at);
  }
  return range;
}

// The ranges that differ in two lines of code beside each other: {del: [left range], ins: [right range]}.
function marksOf([old, line, same], row) {
  if (same || !old?.isCode || !line?.isCode) return null;
  const [a, b] = [old.text, line.text];
  let [start, end] = [0, 0];
  while (start < Math.min(a.length, b.length) && a[start] === b[start]) start++;
  while (end < Math.min(a.length, b.length) - start && a.at(-1 - end) === b.at(-1 - end)) end++;
  if (3 * (start + end) < Math.max(a.length, b.length)) return null; // they have little in common
  return { del: rangeOf(row.cells[1], start, a.length - end), ins: rangeOf(row.cells[3], start, b.length - end) };
}

function cellsOf(line, kind) {
  if (!line) return "<td class='number'></td><td></td>";
  const link = `<a href="${line.name}.py.html#L-${line.number}" tabindex="-1">${line.number}</a>`;
  const indent = Math.min(line.text.search(/\S|$/) + 4, 12); // of what does not fit into the first line
  return `<td class="number ${kind}">${link}</td><td class="${kind}" style="--indent: ${indent}ch">${line.html || " "}</td>`;
}

function sectionOf(name, rows) {
  const near = (at) => rows.slice(Math.max(0, at - CONTEXT), at + CONTEXT + 1).some(([, , same]) => !same);
  let html = "";
  rows.forEach(([old, line, same], at) => {
    const isFar = !near(at);
    if (isFar && (at === 0 || near(at - 1))) html += `<tr class="more"><td colspan="4"><button type="button">⋯ equal lines</button></td></tr>`;
    html += `<tr class="${isFar ? "far" : ""} ${same ?? ""}">${cellsOf(old, same ? "" : "del")}${cellsOf(line, same ? "" : "ins")}</tr>`;
  });
  const count = (side) => rows.filter((row) => row[side] && !row[2]).length;
  const open = FOLDED.includes(name) ? "" : " open";
  const only = [1, 0].filter((side) => rows.every((row) => !row[side])).map((side) => (side ? "left" : "right"))[0] ?? "both";
  return `<details${open}><summary>${name} <small>−${count(0)} +${count(1)}</small></summary><table class="${only}">${COLUMNS}${html}</table></details>`;
}

function show() {
  const state = stateOf(location.hash);
  for (const side of ["left", "right"]) by(side).value = state[side];
  by("code").checked = state.code;
  const rows = rowsOf(state);
  const sections = [];
  for (const row of rows) {
    const name = (row[1] ?? row[0]).section;
    if (sections.at(-1)?.name !== name) sections.push({ name, rows: [] });
    sections.at(-1).rows.push(row);
  }
  const changed = sections.filter(({ rows }) => rows.some(([, , same]) => !same));
  const names = new Set(changed.map(({ name }) => name));
  const equal = sections.map(({ name }) => name).filter((name) => !names.has(name));
  const count = (side) => rows.filter((row) => row[side] && !row[2]).length;
  by("counts").textContent = `${state.left}.py → ${state.right}.py: −${count(0)} +${count(1)} ${state.code ? "lines of code" : "lines"}`;
  by("viewer").innerHTML = changed.map(({ name, rows }) => sectionOf(name, rows)).join("") + `<p>Equal: ${equal.join(", ")}</p>`;
  const shown = [...by("viewer").querySelectorAll("tr:not(.more)")];
  const marks = changed.flatMap((section) => section.rows).map((row, i) => marksOf(row, shown[i])).filter(Boolean);
  for (const kind of ["del", "ins"]) {
    globalThis.CSS?.highlights?.set(kind, new Highlight(...marks.map((of) => of[kind])));
  }
}

for (const side of ["left", "right"]) by(side).innerHTML = Object.keys(SCRIPTS).map((name) => `<option>${name}</option>`).join("");
by("choices").addEventListener("change", ({ target }) => {
  if (target.id === "right") by("left").value = SCRIPTS[target.value].parent ?? "grpo";
  location.hash = `left=${by("left").value}&right=${by("right").value}${by("code").checked ? "" : "&all=1"}`;
});
by("viewer").addEventListener("click", ({ target }) => {
  if (target.closest(".more")) target.closest("table").classList.add("all");
});
window.addEventListener("hashchange", show);
show();
