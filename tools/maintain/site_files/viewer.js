// Shows any two scripts side by side. The address holds the state: #left=grpo&right=dapo&all=1.
// jsdiff finds what differs, and diff2html draws it. SCRIPTS comes from scripts.js, which tools/maintain/site.py writes.
"use strict";

const by = (id) => document.getElementById(id);

// The state that the address holds, as far as it is one.
function stateOf(hash) {
  const asked = new URLSearchParams(hash.replace(/^#/, ""));
  const known = (name, otherwise) => (Object.hasOwn(SCRIPTS, asked.get(name)) ? asked.get(name) : otherwise);
  return { left: known("left", "grpo"), right: known("right", "grpo_ar_lopti"), code: asked.get("all") !== "1" };
}

const address = ({ left, right, code }) => `#left=${left}&right=${right}${code ? "" : "&all=1"}`;
const ORDER = ["advantages", "loss", "update", "sampler", "evaluation", "policy", "main"]; // sections; others follow

// The section and the function or class that a line of a script is in: ["loss", "policy_loss"].
function placeOf(name, lines, number) {
  const heading = /^(?:def|class) (\w+)/;
  const found = lines.slice(0, number).reverse().find((line) => heading.test(line))?.match(heading)[1] ?? "";
  return [SCRIPTS[name].sections[found] ?? "", found];
}

// Both scripts' difference in git's form, the algorithm first, with the place in the right one behind each @@.
function patchOf({ left, right, code }) {
  const texts = [left, right].map((name) => SCRIPTS[name][code ? "code" : "text"]);
  const patch = Diff.structuredPatch(`${left}.py`, `${right}.py`, ...texts, "", "", { context: 3 });
  const lines = texts[1].split("\n");
  const [first, second] = code ? [0, 0] : [left, right].map((name) => SCRIPTS[name].above);
  const head = `--- ${left}.py\n+++ ${right}.py\n`;
  for (const hunk of patch.hunks) hunk.place = placeOf(right, lines, hunk.newStart + 3);
  const rank = (hunk) => (ORDER.includes(hunk.place[0]) ? ORDER.indexOf(hunk.place[0]) : ORDER.length);
  return head + patch.hunks.sort((one, other) => rank(one) - rank(other)).map((hunk) => {
    const [from, to] = [`${hunk.oldStart + first},${hunk.oldLines}`, `${hunk.newStart + second},${hunk.newLines}`];
    return `@@ -${from} +${to} @@ ${hunk.place.filter(Boolean).join(", ")}\n${hunk.lines.join("\n")}\n`;
  }).join("");
}

function about(name) {
  const box = document.createElement("div");
  box.innerHTML = `<h2><a href="${name}.py.html">${name}.py</a></h2><p>${SCRIPTS[name].about}</p><pre tabindex="0"></pre>`;
  box.querySelector("pre").textContent = SCRIPTS[name].objective;
  return box;
}

function show() {
  const state = stateOf(location.hash);
  for (const side of ["left", "right"]) by(side).value = state[side];
  by("code").checked = state.code;
  document.title = `${state.left}.py → ${state.right}.py`;
  by("about").replaceChildren(about(state.left), about(state.right));
  const patch = patchOf(state);
  const count = (sign) => patch.split("\n").slice(2).filter((line) => line.startsWith(sign)).length;
  by("counts").textContent = state.left === state.right ? "Both sides are the same script."
    : `−${count("-")} +${count("+")} ${state.code ? "lines of code" : "lines, with docstrings and comments"}.`;
  const outputFormat = innerWidth < 960 ? "line-by-line" : "side-by-side";
  const colorScheme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
  by("viewer").innerHTML = Diff2Html.html(patch, { outputFormat, colorScheme, drawFileList: false, matching: "lines" });
  for (const box of document.querySelectorAll("#viewer :is(.d2h-file-side-diff, .d2h-file-diff)")) box.tabIndex = 0; // to scroll with keys
}

const names = Object.keys(SCRIPTS);
for (const side of ["left", "right"]) by(side).innerHTML = names.map((name) => `<option>${name}</option>`).join("");
by("grew").innerHTML = names.filter((name) => SCRIPTS[name].parent).map((name) => {
  const { parent, about } = SCRIPTS[name];
  return `<li><a href="#left=${parent}&right=${name}">${parent}.py → ${name}.py</a>: ${about}</li>`;
}).join("");

const choose = (change) => (location.hash = address({ ...stateOf(location.hash), ...change }));
for (const side of ["left", "right"]) by(side).addEventListener("change", (event) => choose({ [side]: event.target.value }));
by("code").addEventListener("change", (event) => choose({ code: event.target.checked }));
by("swap").addEventListener("click", () => {
  const { left, right } = stateOf(location.hash);
  choose({ left: right, right: left });
});
window.addEventListener("hashchange", show);
new MutationObserver(show).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
show();
