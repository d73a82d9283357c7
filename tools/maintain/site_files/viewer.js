// Shows any two scripts side by side. The address holds the state: #left=grpo&right=dapo&code=1&section=loss.
// What differs is found here, so that 18 scripts need not be 306 pages.
// DATA comes from scripts.js, which tools/maintain/site.py writes.
"use strict";

const CONTEXT = 3; // equal lines shown around what differs
const HANG = 4; // columns by which a wrapped line's continuation is indented further than the line
const ALIKE = 0.5; // similarity, 0 to 1, from which two lines are the same line, changed

// ------------------------------------------------------------------------------------------------------ the scripts

const LINES = DATA.lines.map((segments) => segments.map(([, piece]) => piece).join(""));

// A script with, for each line, its text, its section and its piece (tools/family.py).
function script(name) {
  const { lines, pieces, ...rest } = DATA.scripts[name];
  const texts = lines.map((line) => LINES[line]);
  const ofLines = pieces.flatMap(([piece, count]) => Array(count).fill(piece));
  return { name, ...rest, lines, texts, sections: ofLines.map(([, section]) => section || "imports"), pieces: ofLines };
}

// The text of a line, without its comment if only code is shown.
function text(of, line, codeOnly) {
  return codeOnly ? of.texts[line].slice(0, of.code[line]) : of.texts[line];
}

// ---------------------------------------------------------------------------------------------------- what differs

// Python's difflib.SequenceMatcher without "junk": the longest run of equal items, then what is left and right of it.
function matchingBlocks(left, right) {
  const places = new Map();
  right.forEach((item, j) => (places.has(item) ? places.get(item).push(j) : places.set(item, [j])));
  const found = [];
  const waiting = [[0, left.length, 0, right.length]];
  while (waiting.length) {
    const [i, iEnd, j, jEnd] = waiting.pop();
    const best = longestMatch(left, places, i, iEnd, j, jEnd);
    if (!best.size) continue;
    found.push(best);
    waiting.push([i, best.i, j, best.j], [best.i + best.size, iEnd, best.j + best.size, jEnd]);
  }
  found.sort((one, other) => one.i - other.i || one.j - other.j);
  const joined = [];
  for (const block of found) {
    const last = joined.at(-1);
    if (last && last.i + last.size === block.i && last.j + last.size === block.j) last.size += block.size;
    else joined.push(block);
  }
  return joined;
}

function longestMatch(left, places, iStart, iEnd, jStart, jEnd) {
  let best = { i: iStart, j: jStart, size: 0 };
  let sizes = new Map(); // of the run of equal items that ends at the item before and at j
  for (let i = iStart; i < iEnd; i++) {
    const next = new Map();
    for (const j of places.get(left[i]) ?? []) {
      if (j < jStart) continue;
      if (j >= jEnd) break;
      const size = (sizes.get(j - 1) ?? 0) + 1;
      next.set(j, size);
      if (size > best.size) best = { i: i - size + 1, j: j - size + 1, size };
    }
    sizes = next;
  }
  return best;
}

// [[equal, i, iEnd, j, jEnd], …]: the runs of equal items and what is between them.
function opcodes(left, right) {
  const codes = [];
  let [i, j] = [0, 0];
  for (const block of [...matchingBlocks(left, right), { i: left.length, j: right.length, size: 0 }]) {
    if (i < block.i || j < block.j) codes.push([false, i, block.i, j, block.j]);
    if (block.size) codes.push([true, block.i, block.i + block.size, block.j, block.j + block.size]);
    [i, j] = [block.i + block.size, block.j + block.size];
  }
  return codes;
}

function similarity(left, right) {
  const matches = matchingBlocks(left, right).reduce((sum, block) => sum + block.size, 0);
  return (2 * matches) / (left.length + right.length);
}

const indentation = (line) => line.length - line.trimStart().length;

// How badly added lines begin with this one.
function awkwardness(line) {
  return [/^\s*([)\]}]|$)/.test(line) ? 1 : 0, indentation(line)];
}

// opcodes() with added and removed lines moved to where they begin with a statement.
function statementOpcodes(left, right) {
  const ends = [left.length, left.length, right.length, right.length];
  const codes = [[true, 0, 0, 0, 0], ...opcodes(left, right), [true, ...ends]];
  for (let k = 1; k + 1 < codes.length; k++) {
    const [before, here, after] = codes.slice(k - 1, k + 2);
    const [equal, i, iEnd, j, jEnd] = here;
    if (equal || (i < iEnd && j < jEnd)) continue;
    const [lines, first, last] = i === iEnd ? [right, j, jEnd] : [left, i, iEnd];
    let [up, down] = [0, 0];
    while (up < before[2] - before[1] && lines[first - up - 1] === lines[last - up - 1]) up++;
    while (down < after[2] - after[1] && lines[first + down] === lines[last + down]) down++;
    let best = null;
    for (let by = -up; by <= down; by++) {
      const cost = [...awkwardness(lines[first + by]), Math.abs(by)];
      if (!best || smaller(cost, best.cost)) best = { by, cost };
    }
    for (const [code, places] of [[before, [2, 4]], [here, [1, 2, 3, 4]], [after, [1, 3]]]) {
      for (const place of places) code[place] += best.by;
    }
  }
  return codes;
}

function smaller(one, other) {
  const place = one.findIndex((value, k) => value !== other[k]);
  return place >= 0 && one[place] < other[place];
}

// Which lines are alike: pairs [i, j], in order on both sides, with the largest sum of similarities.
function mates(left, right) {
  if (left.length * right.length > 5000) return []; // rather rewritten than changed
  const words = (line) => line.match(/[\p{L}\p{N}_]+|[^\p{L}\p{N}_\s]/gu) ?? [];
  const [leftWords, rightWords] = [left.map(words), right.map(words)];
  let best = Array(right.length + 1).fill({ sum: 0, pairs: [] }); // of the lines so far and the first j on the right
  leftWords.forEach((some, i) => {
    const above = best;
    best = [{ sum: 0, pairs: [] }];
    rightWords.forEach((others, j) => {
      let choice = above[j + 1];
      if (best[j].sum > choice.sum) choice = best[j];
      const alike = some.length && others.length ? similarity(some, others) : 0;
      if (alike >= ALIKE && above[j].sum + alike > choice.sum) {
        choice = { sum: above[j].sum + alike, pairs: [...above[j].pairs, [i, j]] };
      }
      best.push(choice);
    });
  });
  return best.at(-1).pairs;
}

// The character ranges in which two lines differ, whole words at a time: [of the left, of the right].
function wordMarks(left, right) {
  const words = [left, right].map((line) => line.match(/[\p{L}\p{N}_]+|\s+|[^\p{L}\p{N}_\s]/gu) ?? []);
  const starts = words.map((side) => side.reduce((found, word) => [...found, found.at(-1) + word.length], [0]));
  const marks = [[], []];
  for (const [equal, ...ends] of opcodes(...words)) {
    if (equal) continue;
    for (const side of [0, 1]) {
      const [first, last] = ends.slice(2 * side, 2 * side + 2);
      if (first < last) marks[side].push([starts[side][first], starts[side][last]]);
    }
  }
  return marks;
}

// The rows of two lists of lines, in order; where lines were replaced, those that are alike share a row.
// A row: {left, right: numbers of lines, or null; equal; marks}.
function compare(left, right) {
  const rows = [];
  for (let [equal, i, iEnd, j, jEnd] of statementOpcodes(left, right)) {
    if (equal) {
      for (; i < iEnd; i++, j++) rows.push({ left: i, right: j, equal: true, marks: [[], []] });
      continue;
    }
    const pairs = i < iEnd && j < jEnd ? mates(left.slice(i, iEnd), right.slice(j, jEnd)) : [];
    const [iStart, jStart] = [i, j];
    for (const [mateI, mateJ] of [...pairs.map(([a, b]) => [iStart + a, jStart + b]), [iEnd, jEnd]]) {
      while (i < mateI || j < mateJ) {
        const one = { left: i < mateI ? i++ : null, right: j < mateJ ? j++ : null };
        rows.push({ ...one, equal: false, marks: [[], []] });
      }
      if (mateI < iEnd) {
        rows.push({ left: i, right: j, equal: false, marks: wordMarks(left[i], right[j]) });
      }
      [i, j] = [mateI + 1, mateJ + 1];
    }
  }
  return rows;
}

// The values in runs of those with the same key: [[key, values], …].
function groups(values, key) {
  const found = [];
  for (const value of values) {
    const its = key(value);
    if (found.length && found.at(-1)[0] === its) found.at(-1)[1].push(value);
    else found.push([its, [value]]);
  }
  return found;
}

// The two scripts as parts {name, rows, differs}: the code section by section, then the docstring.
function parts(left, right, codeOnly) {
  const rowsOf = (leftLines, rightLines) => {
    const texts = [leftLines.map((k) => text(left, k, codeOnly)), rightLines.map((k) => text(right, k, codeOnly))];
    return compare(...texts).map((row) => ({
      ...row,
      left: row.left === null ? null : leftLines[row.left],
      right: row.right === null ? null : rightLines[row.right],
    }));
  };
  const inDocstring = (of, k) => of.pieces[k][0] === "module docstring";
  const isCode = (of) => (k) => (codeOnly ? of.code[k] > 0 : !inDocstring(of, k));
  const lines = (of, choose) => [...of.texts.keys()].filter(choose);
  const section = (row) => (row.right === null ? left.sections[row.left] : right.sections[row.right]);
  const differs = (rows) => rows.some((row) => !row.equal);

  const code = groups(rowsOf(lines(left, isCode(left)), lines(right, isCode(right))), section);
  const found = [];
  for (const [differ, run] of groups(code, ([, rows]) => differs(rows))) {
    if (differ) found.push(...run.map(([name, rows]) => ({ name, rows, differs: true })));
    else {
      const name = run.map(([name]) => name).join(", ");
      found.push({ name, rows: run.flatMap(([, rows]) => rows), differs: false });
    }
  }
  if (!codeOnly) {
    const rows = rowsOf(...[left, right].map((of) => lines(of, (k) => inDocstring(of, k))));
    if (rows.length) found.push({ name: "docstring", rows, differs: differs(rows) });
  }
  return found;
}

// [[folded, rows], …]: what is more than CONTEXT rows from any difference is folded; a single row is not.
function blocks(rows) {
  const near = new Set([-1, rows.length]);
  rows.forEach((row, k) => {
    if (!row.equal) for (let at = k - CONTEXT; at <= k + CONTEXT; at++) near.add(at);
  });
  const alone = [...rows.keys()].filter((k) => near.has(k - 1) && near.has(k + 1));
  alone.forEach((k) => near.add(k));
  return groups([...rows.keys()], (k) => !near.has(k)).map(([fold, run]) => [fold, run.map((k) => rows[k])]);
}

// What is folded: the first and the last definition in it, or the sections.
function foldTitle(rows, right, part) {
  let names = [part.name];
  if (part.differs) {
    const filled = rows.filter((row) => right.texts[row.right].trim());
    names = filled.map((row) => right.pieces[row.right]);
    names = names.filter(([name, section]) => name !== `section ${section}`).map(([name]) => name);
    names = [...new Set([...names.slice(0, 1), ...names.slice(-1)])];
  }
  return `${rows.length} equal lines${names.length ? ": " : ""}${names.join(" … ")}`;
}

// -------------------------------------------------------------------------------------------------------- the page

const escaped = (plain) => plain.replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);

// A line's pieces, cut where marks begin and end, as HTML.
function coloured(segments, marks, length) {
  let [html, at] = ["", 0];
  for (const [kind, whole] of segments) {
    const piece = whole.slice(0, Math.max(0, length - at));
    const inside = marks.flat().filter((end) => end > at && end < at + piece.length);
    const ends = [...new Set([at, ...inside, at + piece.length])].sort((one, other) => one - other);
    for (let k = 0; k + 1 < ends.length; k++) {
      const cut = escaped(piece.slice(ends[k] - at, ends[k + 1] - at));
      const shown = kind ? `<span class="${kind}">${cut}</span>` : cut;
      html += marks.some(([first, last]) => first <= ends[k] && ends[k] < last) ? `<mark>${shown}</mark>` : shown;
    }
    at += whole.length;
  }
  return html;
}

function cells(row, side, of, codeOnly) {
  const k = side ? row.right : row.left;
  const name = side ? "right" : "left";
  if (k === null) {
    return ["n", "s", "c"].map((column) => `<td class="${column} none ${name}"></td>`).join("");
  }
  const sign = row.equal ? " " : "−+"[side];
  const classes = name + (row.equal ? "" : [" minus", " plus"][side]);
  const shown = text(of, k, codeOnly);
  return (
    `<td class="n ${classes}">${k + 1}</td><td class="s ${classes}">${sign}</td>` +
    `<td class="c ${classes}" style="--hang: ${indentation(shown) + HANG}ch">` +
    `${coloured(DATA.lines[of.lines[k]], row.marks[side], shown.length)}</td>`
  );
}

function table(rows, scripts, codeOnly) {
  const columns = '<col class="n"><col class="s"><col>'.repeat(2);
  const lines = rows.map((row) => {
    const both = [0, 1].map((side) => cells(row, side, scripts[side], codeOnly)).join("");
    return `<tr class="${row.equal ? "equal" : "differs"}">${both}</tr>`;
  });
  return `<table class="diff"><colgroup>${columns}</colgroup>${lines.join("")}</table>`;
}

function partHtml(part, scripts, codeOnly) {
  const found = blocks(part.rows).map(([fold, rows]) => {
    const lines = table(rows, scripts, codeOnly);
    if (!fold) return lines;
    return `<details class="fold"><summary>${escaped(foldTitle(rows, scripts[1], part))}</summary>${lines}</details>`;
  });
  return found.join("");
}

function count(rows) {
  const changed = rows.filter((row) => !row.equal);
  return [changed.filter((row) => row.left !== null).length, changed.filter((row) => row.right !== null).length];
}

// The state that the address holds, as far as it is one.
function stateOf(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const known = (name, otherwise) => (Object.hasOwn(DATA.scripts, asked.get(name)) ? asked.get(name) : otherwise);
  return {
    left: known("left", DATA.start[0]),
    right: known("right", DATA.start[1]),
    code: asked.get("code") === "1",
    section: asked.get("section") ?? "",
  };
}

function address({ left, right, code, section }) {
  return `#left=${left}&right=${right}${code ? "&code=1" : ""}${section ? `&section=${section}` : ""}`;
}

function summary(scripts, found, state) {
  const about = scripts.map((of) => {
    const objective = of.objective && `<pre aria-label="objective of ${of.name}.py">${escaped(of.objective)}</pre>`;
    return `<div><h2><a href="${of.name}.py.html">${of.name}.py</a></h2><p>${escaped(of.about)}</p>${objective}</div>`;
  });
  const [removed, added] = count(found.flatMap((part) => part.rows));
  const what = state.code ? "lines of code" : "lines, with docstrings and comments";
  const items = found.filter((part) => part.differs).map((part) => {
    const [minus, plus] = count(part.rows);
    return `<li><a href="${address({ ...state, section: part.name })}">${part.name}</a> (−${minus} +${plus})</li>`;
  });
  const list = items.length ? `<nav aria-label="Sections that differ"><ul>${items.join("")}</ul></nav>` : "";
  const same = state.left === state.right ? "Both sides are the same script." : `−${removed} +${added} ${what}.`;
  return `<div class="both">${about.join("")}</div><div class="counts"><p role="status">${same}</p>${list}</div>`;
}

let shown = ""; // the address of what is on the page, without the section

function show() {
  const state = stateOf(location.hash);
  for (const side of ["left", "right"]) document.getElementById(side).value = state[side];
  document.getElementById("code").checked = state.code;
  const wanted = address({ ...state, section: "" });
  const viewer = document.getElementById("viewer");
  if (wanted !== shown) {
    const scripts = [script(state.left), script(state.right)];
    const found = parts(...scripts, state.code);
    const sections = found.map((part) => {
      const html = partHtml(part, scripts, state.code);
      if (!part.differs) return html;
      return `<section id="section-${part.name}"><h2 tabindex="-1">${part.name}</h2>${html}</section>`;
    });
    viewer.innerHTML = summary(scripts, found, state) + sections.join("");
    document.title = `${state.left}.py → ${state.right}.py`;
    shown = wanted;
  }
  const heading = state.section && document.querySelector(`#section-${CSS.escape(state.section)} h2`);
  if (heading) {
    heading.scrollIntoView();
    heading.focus({ preventScroll: true });
  }
}

function choose(change) {
  location.hash = address({ ...stateOf(location.hash), section: "", ...change });
}

for (const side of ["left", "right"]) {
  document.getElementById(side).addEventListener("change", (event) => choose({ [side]: event.target.value }));
}
document.getElementById("code").addEventListener("change", (event) => choose({ code: event.target.checked }));
document.getElementById("swap").addEventListener("click", () => {
  const { left, right } = stateOf(location.hash);
  choose({ left: right, right: left });
});
document.getElementById("choices").addEventListener("submit", (event) => event.preventDefault());
window.addEventListener("hashchange", show);
show();
