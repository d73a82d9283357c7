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

// Both scripts' difference in git's form, with the name of the function or class behind each @@.
function patchOf({ left, right, code }) {
  const texts = [left, right].map((name) => SCRIPTS[name][code ? "code" : "text"]);
  const patch = Diff.structuredPatch(`${left}.py`, `${right}.py`, ...texts, "", "", { context: 3 });
  const lines = texts[1].split("\n");
  const heading = /^(?:def|class) (\w+)/;
  return `--- ${left}.py\n+++ ${right}.py\n` + patch.hunks.map((hunk) => {
    const above = lines.slice(0, hunk.newStart + 3).findLast((line) => heading.test(line));
    const [from, to] = [`${hunk.oldStart},${hunk.oldLines}`, `${hunk.newStart},${hunk.newLines}`];
    return `@@ -${from} +${to} @@ ${above?.match(heading)[1] ?? ""}\n${hunk.lines.join("\n")}\n`;
  }).join("");
}

function show() {
  const state = stateOf(location.hash);
  for (const side of ["left", "right"]) by(side).value = state[side];
  by("code").checked = state.code;
  const patch = patchOf(state);
  const count = (sign) => patch.split("\n").slice(2).filter((line) => line.startsWith(sign)).length;
  by("counts").textContent = `−${count("-")} +${count("+")} ${state.code ? "lines of code" : "lines"}`;
  const outputFormat = innerWidth < 960 ? "line-by-line" : "side-by-side";
  const colorScheme = document.body.dataset.mdColorScheme === "slate" ? "dark" : "light";
  by("viewer").innerHTML = Diff2Html.html(patch, { outputFormat, colorScheme, drawFileList: false, matching: "lines" });
}

for (const side of ["left", "right"]) by(side).innerHTML = Object.keys(SCRIPTS).map((name) => `<option>${name}</option>`).join("");
by("choices").addEventListener("change", () => {
  location.hash = `left=${by("left").value}&right=${by("right").value}${by("code").checked ? "" : "&all=1"}`;
});
window.addEventListener("hashchange", show);
new MutationObserver(show).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
show();
