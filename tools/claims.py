"""What the papers claim, and what came out here: writes docs/claims.md.

    python -m tools.claims            writes the page
    python -m tools.claims --check    changes nothing; exit code 1 if the file is out of date

CLAIMS has every figure, table, equation and numbered statement of both papers, and the figures and statements of the
notes, with what each says and what measures it here. No verdict stands in it. Each is read from what the measurements
left behind: the verdicts in lab/results/*.json, the kept runs in benchmarks/kk_tiny (with the functions of
tools/compare.py), the times in benchmarks/results. So the page changes if a result changes, and a measurement that
comes later fills its row.
"""

import ast
import functools
import json
import math
import re
import sys
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))
from runtime import curves
from tools import compare, family, generated

ROOT = family.ROOT
FILE = ROOT / "docs" / "claims.md"
LAB = ROOT / "lab" / "results"
RUNS = ROOT / "benchmarks" / "kk_tiny"
TIMES = ROOT / "benchmarks" / "results" / "limit.json"
WORDS = ROOT / "benchmarks" / "results" / "words.json"

SHOWS, DOES_NOT_SHOW, CANNOT_TELL = "shows", "does not show", "cannot tell at this scale"  # those of lab.common.verdict
NOT_MEASURED = "not measured here"
TESTED = "holds in a test"
NO_CLAIM = "no claim"
MEANING = {
    SHOWS: "the effect is there; where a row has a comparison beside it, that may be as large",
    DOES_NOT_SHOW: "no difference of 2 standard errors in the claimed direction: it may be too small to see here, or "
    "point the other way (marked: the opposite)",
    CANNOT_TELL: "too few tokens or runs, or the two test accuracies disagree",
    NOT_MEASURED: "no result is kept here, or no command measures it",
    TESTED: "an identity, which a test checks against numbers worked out by hand or finite differences",
    NO_CLAIM: "a definition or a setting; the row says where it is in the code",
}
SEEDS = 3  # fewer can't tell
ERRORS = 2  # a difference counts from so many standard errors on
EVALUATION = "eval/accuracy"


# ------------------------------------------------------------------------------------------------------------- sources


@dataclass(frozen=True)
class Finding:
    """What a source says: one of the words of MEANING, and the numbers in words."""

    word: str
    numbers: str = ""


@dataclass(frozen=True)
class Folders:
    """Where the results are."""

    lab: Path = LAB
    runs: Path = RUNS
    times: Path = TIMES
    words: Path = WORDS


@dataclass(frozen=True)
class Lab:
    """The verdicts of lab/results/NAME.json whose claims begin with one of these texts."""

    name: str
    claims: tuple

    def command(self):
        """The command, if there is such a module."""
        return f"`python -m lab.{self.name}`" if (ROOT / "lab" / f"{self.name}.py").is_file() else ""

    def verdicts(self, folders):
        """[(claim, word, numbers)] of the file that are meant; [] without a file."""
        found = read_lab(folders.lab / f"{self.name}.json")
        return [verdict for verdict in found if verdict[0].startswith(self.claims)]

    def findings(self, folders):
        verdicts = self.verdicts(folders)
        found = []
        said = set()
        for claim, word, numbers in verdicts:
            # What tells it from the others, as in "… (equal lr, 1 update)"; it may have parentheses of its own.
            ending = re.search(r"\(((?:[^()]|\([^()]*\))*)\)$", claim)
            label = f"{ending[1]}: " if ending and len(verdicts) > 1 else ""
            # Two verdicts may look at one long row of numbers, such as its second and its last.
            is_said = label and numbers in said and len(numbers) > 60
            found.append(Finding(word, label + ("the same numbers" if is_said else numbers)))
            said.add(numbers)
        return found


@dataclass(frozen=True)
class Ahead:
    """That an entry of a suite of tools/compare.py is ahead of another one, with the same seeds.

    sign: −1 if the claim is that it is behind. key: what is compared; accuracies are compared twice, as in the suite's
    table, other metrics by the mean of the last five steps. is_control: shown, but no part of the verdict.
    """

    suite: str
    entry: str
    base: str
    sign: int = 1
    key: str = EVALUATION
    is_control: bool = False

    def command(self):
        return f"`python tools/compare.py --suite {self.suite}`"

    def findings(self, folders):
        """One Finding, or none if no seed is kept of both."""
        ours, theirs = (kept_runs(folders.runs, self.suite, name) for name in (self.entry, self.base))
        seeds = [seed for seed in ours if seed in theirs]
        if not seeds:
            return []
        pairs = [(ours[seed], theirs[seed]) for seed in seeds]
        _, last = compare.names_of_evaluations([run for pair in pairs for run in pair])
        if self.key == EVALUATION:
            measures = {"mean": compare.final, f"at {last}": compare.at_the_end}
        else:
            measures = {f"{curves.TITLES[self.key]}, last 5 steps": late_mean}
        shown, holds, opposite = [], [], []
        for name, measure in measures.items():
            differences = [measure(a, self.key) - measure(b, self.key) for a, b in pairs]
            mean, error = compare.mean_and_error(differences)
            holds.append(self.sign * mean > ERRORS * error)
            opposite.append(self.sign * mean < -ERRORS * error)
            shown.append(f"{compare.shown_difference(differences)} {name}")
        numbers = f"{self.entry} minus {self.base}: {', '.join(shown)}"
        if len(seeds) < SEEDS:
            return [Finding(CANNOT_TELL, f"{numbers}; {len(seeds)} seed{'s' * (len(seeds) > 1)}")]
        word = SHOWS if all(holds) else CANNOT_TELL if any(holds) else DOES_NOT_SHOW
        return [Finding(word, f"{numbers} (the opposite)" if all(opposite) and not self.is_control else numbers)]


@dataclass(frozen=True)
class Cost:
    """Lopti's and AR's update against GRPO's, from benchmarks/results/limit.json."""

    least: float  # times GRPO's, of Lopti's
    most: float  # of AR's

    def command(self):
        return "`python benchmarks/limit.py`"

    def findings(self, folders):
        if not folders.times.exists():
            return []
        phases = json.loads(folders.times.read_text())["phases"]
        seconds = {name: phases[name]["seconds"] for name in ("update", "update, AR", "update, Lopti")}
        lopti, ar = (seconds[f"update, {name}"] / seconds["update"] for name in ("Lopti", "AR"))
        numbers = (
            f"an update takes {lopti:.2f} times GRPO's with Lopti (asked: at least {self.least:g}) and {ar:.2f} times "
            f"with AR (at most {self.most:g})"
        )
        return [Finding(SHOWS if lopti >= self.least and ar <= self.most else DOES_NOT_SHOW, numbers)]


@dataclass(frozen=True)
class Words:
    """Whether some families of words go with the reward and some against it, by the result of evaluate.py --words."""

    what: str

    def command(self):
        return f"`{self.what}`"

    def findings(self, folders):
        """One Finding. Rank correlations count from two standard errors on, as those of independent responses."""
        if not folders.words.exists():
            return []
        [about] = json.loads(folders.words.read_text())["rows"]
        related = {}
        for name, found in about["words"].items():
            if found["spearman"] is not None:  # a family that is never used has none
                related[name] = found["spearman"]
        least = ERRORS / math.sqrt(about["responses"] - 1)
        has_both = max(related.values()) > least and min(related.values()) < -least
        ordered = sorted(related, key=related.get, reverse=True)
        numbers = ", ".join(f"{name} {related[name]:+.2f}" for name in ordered).replace("-", "−")
        said = (
            f"rank correlation with the reward: {numbers} ({about['responses']} responses; counts from {least:.2f} on)"
        )
        return [Finding(SHOWS if has_both else DOES_NOT_SHOW, said)]


@dataclass(frozen=True)
class Test:
    """A test of the suite that checks an identity. It counts if the file defines it."""

    file: str
    name: str

    def command(self):
        return f"`pytest tests/{self.file}`"

    def findings(self, folders):
        path = ROOT / "tests" / self.file
        return [Finding(TESTED, f"`{self.name}`")] if self.name in defined_in(path) else []


@dataclass(frozen=True)
class Where:
    """No claim: a definition or a setting, and where it is in the code. name: what the file defines, or empty."""

    file: str
    name: str = ""

    def command(self):
        return ""

    def findings(self, folders):
        path = ROOT / self.file
        if not path.is_file() or (self.name and self.name not in defined_in(path)):
            return []
        name = f", `{self.name}`" if self.name else ""
        return [Finding(NO_CLAIM, f"[`{self.file}`](../{self.file}){name}")]


@dataclass(frozen=True)
class Unmeasured:
    """What would measure it, a command or nothing, and nothing is kept."""

    what: str = ""

    def command(self):
        return f"`{self.what}`" if self.what else ""

    def findings(self, folders):
        return []


@dataclass(frozen=True)
class Claim:
    """A row of the page."""

    item: str  # "Figure 6(a)", "Lemma 1, eq. 4, 9–36"
    says: str  # in one line
    sources: tuple  # of what came out here; all of them count
    why: str  # what one must know to judge the verdict


def read_lab(path):
    """[(claim, word, numbers)], the verdicts of a result of the lab; [] if there is none."""
    return json.loads(path.read_text(encoding="utf-8"))["verdicts"] if path.exists() else []


def kept_runs(folder, suite, entry):
    """{seed: kept run} of a suite's entry. ValueError if one was made with other flags."""
    common, entries = compare.SUITES[suite]
    command = " ".join([*compare.read_entries(entries)[entry], *common.split()])
    runs = {}
    for path in sorted(folder.glob(compare.kept_file(folder, entry, "*").name)):
        seed = int(path.stem.rpartition("_")[2])
        runs[seed] = compare.read_kept(path, f"{command} --seed {seed}")
    return runs


def late_mean(run, key):
    """The mean of a metric over a run's last five steps, as in the tables of tools/compare.py."""
    return fmean(curves.points(run["rows"], key)[1][-5:])


@functools.cache
def defined_in(path):
    """The names of a file's functions and classes."""
    if not path.is_file():
        return set()
    return {node.name for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if hasattr(node, "name")}


def combined(words):
    """One word for several findings: a claim shows if all of them show it. None at all: not measured."""
    for word in (NOT_MEASURED, DOES_NOT_SHOW, CANNOT_TELL):
        if word in words:
            return word
    return words[0] if words else NOT_MEASURED


def judged(claim, folders):
    """The Finding of a claim: one word, and the numbers of all its sources.

    A file of the lab that isn't there is left out if another source has a result. Any other source without a result
    makes the claim not measured.
    """
    words, numbers = [], []
    for source in claim.sources:
        is_control = isinstance(source, Ahead) and source.is_control
        findings = source.findings(folders)
        for finding in findings:
            numbers.append(f"for comparison, {finding.numbers}" if is_control else finding.numbers)
        if not is_control:
            words += [finding.word for finding in findings]
            if not findings and not isinstance(source, Lab):
                words.append(NOT_MEASURED)
    word = combined(words)
    text = "; ".join(number for number in numbers if number)
    if len(set(words)) > 1 and {*words} <= {SHOWS, DOES_NOT_SHOW, CANNOT_TELL, NOT_MEASURED}:
        parts = ", ".join(f"{count} × {one}" for one, count in Counter(words).items())
        text = f"({parts}) {text}"
    return Finding(word, text)


# -------------------------------------------------------------------------------------------------------------- claims

BIG = "it needs a GPU and a model of 3 to 8 billion parameters"
SHOWN_FOR_GRPO = "the same claim as Figure 4, for a model that was not run here"


def ahead(*names, **options):
    return Ahead("comparison", *names, **options)


AR_LOPTI = (
    Claim(
        "Figure 1(a), (d)",
        "improbable tokens have the largest part of the gradient norms, beyond their number",
        (Lab("who_dominates", ("improbable tokens (p ≤ 0.25) have the largest part",)),),
        "the bins' norms are summed, as in the figure; the bin above, 0.25 to 0.5, is not part of the claim",
    ),
    Claim(
        "Figure 1(b)",
        "the advantages of the four bins",
        (Where("lab/who_dominates.py", "boxes_of"),),
        "drawn by `python -m lab.who_dominates`",
    ),
    Claim(
        "Figure 1(c), (e)",
        "updating improbable tokens alone moves all tokens as the whole update does",
        (Lab("who_dominates", ("updating only improbable tokens moves",)),),
        "SGD with the paper's learning rate, and with one at which kk_tiny moves as in its own runs",
    ),
    Claim(
        "Figure 1(f)",
        "probable tokens move more if improbable ones alone are updated than if they alone are",
        (Lab("who_dominates", ("probable tokens move more if only improbable",)),),
        "a token of p near 1 can hardly move, and kk_tiny has many",
    ),
    Claim(
        "eq. 1, 5",
        "GRPO's objective",
        (Where("grpo.py", "policy_loss"),),
        "divided by all response tokens of the mini-batch",
    ),
    Claim(
        "eq. 2, 6–8",
        "its gradient is Σ w·∇ log π, with the w of eq. 2",
        (
            Test("test_lab.py", "test_weights_times_gradients_of_log_pi_are_the_update_of_a_real_model"),
            Test("test_lab.py", "test_the_kl_term_pulls_back"),
        ),
        "true of every script that has an update, with its own w",
    ),
    Claim(
        "Assumption 4.1",
        "no layer shrinks a gradient to nothing: its Jacobian's singular values have a useful lower bound",
        (Lab("proposition", ("the bounds at the layers say how large",)),),
        "judged by its consequence: are the bounds within a factor of 10 of the tokens?",
    ),
    Claim(
        "Proposition 4.2, eq. 3, 17, 19",
        "the norm of a token's gradient at any layer lies between two multiples of 1 − π",
        (Lab("proposition", ("every token is within the bounds",)),),
        "how loose the bounds are is judged under Assumption 4.1",
    ),
    Claim(
        "Figure 2",
        "so the norm grows with 1 − π, from nearly zero on",
        (Lab("proposition", ("over orders of magnitude",)),),
        "correlation of the logarithms at each layer, over all tokens",
    ),
    Claim(
        "Section 4.1, layers",
        "the norm is roughly proportional to 1 − π at every layer",
        (Lab("proposition", ("the norm is roughly proportional",)),),
        "a correlation of at least 0.8; at the logits it is nearly an identity, below them the direction counts too",
    ),
    Claim(
        "Section 4.1, all parameters",
        "and so is the norm of the gradient of all parameters",
        (Lab("forking_tokens", ("the norm of a token's gradient at all weights",)),),
        "a correlation of at least 0.8, over all tokens: most have 1 − π near 0; 1 − π ≥ 0.25 alone was not looked at",
    ),
    Claim(
        "eq. 9–15",
        "the gradient at the logits is w·(one-hot − p), and back-propagation multiplies by the layers' Jacobians",
        (
            Test("test_lab.py", "test_the_gradient_at_the_logits_is_one_hot_minus_p"),
            Test("test_lab.py", "test_the_gradient_is_the_product_of_the_jacobians"),
        ),
        "with kk_tiny and a temperature",
    ),
    Claim(
        "eq. 16, 18",
        "its norm lies between √(N/(N−1))·(1 − π) and √2·(1 − π)",
        (Test("test_lab.py", "test_the_gradient_at_the_logits_is_one_hot_minus_p"),),
        "eq. 16 prints the root over (1 − π) too; without it the line before it follows",
    ),
    Claim(
        "Figure 3, GRPO",
        "an update raises the probability of probable positive tokens less often than that of improbable ones",
        (Lab("right_direction", ("GRPO moves positive improbable tokens",)),),
        "p ≤ 0.25 against p > 0.75; between them there is no such order here",
    ),
    Claim(
        "Figure 3, AR",
        "AR moves more of the probable positive tokens the right way",
        (Lab("right_direction", ("AR moves more of the positive",)),),
        "AR's step is shorter than GRPO's, so it is also made as long",
    ),
    Claim(
        "Figure 3, Lopti",
        "so does Lopti",
        (Lab("right_direction", ("Lopti moves more of the positive",)),),
        "Lopti's step is made as long as GRPO's too",
    ),
    Claim(
        "eq. 4",
        "AR's weights are α·π + 1 − α",
        (Test("test_lab.py", "test_ar_scales_the_advantages_by_alpha_pi_plus_1_minus_alpha"),),
        "π of the sampling policy, without gradient",
    ),
    Claim(
        "Algorithm 1",
        "GRPO with AR and Lopti",
        (Where("grpo_ar_lopti.py", "in_stage"),),
        "with α 0 and η 0 it is `grpo.py`, bit for bit",
    ),
    Claim(
        "Figure 4, AR",
        "AR learns more than GRPO on K&K (+35.9 % with 3B)",
        (ahead("ar", "grpo"),),
        "12 steps of a model of a million parameters; the paper's runs have 360 of 3 to 7 billion",
    ),
    Claim(
        "Figure 4, Lopti",
        "so does Lopti (+38.5 %)",
        (
            ahead("lopti", "grpo"),
            Ahead("long", "lopti, 40 steps", "grpo, 40 steps"),
            ahead("lopti", "grpo 4 updates", is_control=True),
            Ahead("long", "lopti, 40 steps", "grpo 4 updates, 40 steps", is_control=True),
            Ahead("learning_rate", "lr 3e-5, lopti", "lr 3e-5", is_control=True),
            Ahead("learning_rate", "lr 3e-4, lopti", "lr 3e-4", is_control=True),
        ),
        "Lopti makes twice as many optimizer steps; GRPO with 4 updates makes as many",
    ),
    Claim(
        "Figure 4, AR and Lopti",
        "both together learn the most (+46.2 %)",
        (
            ahead("ar+lopti", "grpo"),
            Ahead("long", "ar+lopti, 40 steps", "grpo, 40 steps"),
            ahead("ar+lopti", "lopti"),
            ahead("ar+lopti", "grpo 4 updates", is_control=True),
            Ahead("long", "ar+lopti, 40 steps", "grpo 4 updates, 40 steps", is_control=True),
        ),
        "more than GRPO and more than Lopti alone; GRPO with 4 updates makes as many optimizer steps",
    ),
    Claim(
        "Figure 5(a)",
        "some words of reasoning go with a higher reward, others with a lower one",
        (
            Words(
                "python evaluate.py models/kk_tiny --suite kk --people 2-4 --samples 8 --temperature 1 --limit 50 "
                "--words"
            ),
        ),
        "over puzzles of 2 to 4 people; the families of words are the paper's (Table 5)",
    ),
    Claim(
        "Figure 5(b)",
        "AR and Lopti use more of the first kind and fewer of the second",
        (Unmeasured("python evaluate.py runs/lopti runs/grpo --versus runs/grpo --suite kk --words --samples 8"),),
        "runs/lopti and runs/grpo: two finished runs; no result of it is kept",
    ),
    Claim(
        "Table 1, AR",
        "AR improves the mean on mathematics (ORZ: 39.83 to 41.09)",
        (Unmeasured("python grpo_ar_lopti.py --task math --alpha 0.1 --eta 0"),),
        BIG,
    ),
    Claim(
        "Table 1, Lopti",
        "so does Lopti (40.66)",
        (Unmeasured("python grpo_ar_lopti.py --task math --alpha 0 --eta 0.5"),),
        BIG,
    ),
    Claim(
        "Figure 6(a)",
        "without the probable tokens GRPO learns much less",
        (Ahead("stages", "low alone", "grpo", sign=-1), Ahead("stages", "high alone", "grpo", is_control=True)),
        "probably because in kk_tiny a few improbable tokens choose between guessing and reasoning",
    ),
    Claim(
        "Figure 6(b)",
        "probable tokens first, then the improbable ones, is worse than GRPO and collapses",
        (
            Ahead("stages", "high, then low", "grpo", sign=-1),
            Ahead("stages", "high, then low", "lopti", is_control=True),
        ),
        "either order makes twice as many optimizer steps as GRPO",
    ),
    Claim(
        "Figure 6(c)",
        "AR with α of 0.2 and 0.3 is ahead of GRPO",
        (Ahead("alpha", "alpha 0.2", "grpo, float32"), Ahead("alpha", "alpha 0.3", "grpo, float32")),
        "the other values of α, which may be worse than GRPO, are in the suite too",
    ),
    Claim(
        "Figure 6(d)",
        "Lopti with η of 0.3 and 0.5 is ahead of GRPO",
        (
            Ahead("eta", "eta 0.3", "grpo, float32"),
            Ahead("eta", "eta 0.5", "grpo, float32"),
            Ahead("eta", "eta 0.3", "grpo 4 updates, float32", is_control=True),
            Ahead("eta", "eta 0.5", "grpo 4 updates, float32", is_control=True),
        ),
        "Lopti makes two optimizer steps of one update: GRPO with four updates makes as many; other values are in the"
        " suite too",
    ),
    Claim(
        "Table 2",
        "hyperparameters of GRPO",
        (Where("grpo.py", "Args"), Test("test_releases.py", "test_grpos_settings_are_those_of_ar_loptis_release")),
        "the defaults on a GPU",
    ),
    Claim(
        "Table 3",
        "α and η",
        (Where("grpo_ar_lopti.py", "Args"),),
        "on mathematics one of the two alone",
    ),
    Claim(
        "Table 4",
        "the reward of K&K",
        (Where("rewards/kk.py", "score"),),
        "Logic-RL's rule with its holes; `strict` closes them",
    ),
    Claim(
        "Figure 7, lengths",
        "responses are slightly longer with AR, with Lopti and with both",
        tuple(ahead(name, "grpo", key="response_tokens") for name in ("ar", "lopti", "ar+lopti")),
        "in kk_tiny a longer response is a careful one, so length follows accuracy",
    ),
    Claim(
        "Figure 7, gradient norms",
        "the gradient norm is lower with AR",
        (ahead("ar", "grpo", sign=-1, key="grad_norm"),),
        "AR makes advantages smaller; Lopti's norm is of one stage, so it can't be compared",
    ),
    Claim("Figure 8", "the same with Qwen2.5-7B-Instruct-1M", (Unmeasured(),), SHOWN_FOR_GRPO),
    Claim("Table 5", "six families of words", (Where("tools/words.py", "count_words"),), "all their forms"),
    Claim(
        "Figure 9",
        "the same on DSR-uniform: small gains, early convergence",
        (Unmeasured("python grpo_ar_lopti.py --task math --alpha 0.1 --eta 0 --epochs 5"),),
        BIG,
    ),
    Claim(
        "Figure 10",
        "the same on ORZ",
        (Unmeasured("python grpo_ar_lopti.py --task math --alpha 0 --eta 0.5"),),
        BIG,
    ),
    Claim(
        "Table 6",
        "Lopti's update takes twice as long (17.6 to 35.3 s with 3B), AR's as long as GRPO's",
        (Cost(least=1.5, most=1.1),),
        "1.5 times is enough; the same batches for all three, with SmolLM2-135M on a CPU",
    ),
    Claim(
        "Figure 11",
        "mathematics has fewer improbable tokens than K&K",
        (Lab("two_tasks", ("countdown has fewer",)),),
        "SmolLM2-135M in place of Qwen2.5-7B, and Countdown in place of DeepScaleR; right on neither, so its gradients "
        "are those of the log-probabilities",
    ),
    Claim(
        "eq. 20, 21",
        "REINFORCE++'s advantages and objective",
        (Where("reinforce_pp.py", "token_returns"),),
        "eq. 20 prints k1 as a ratio; it is the ratio's logarithm",
    ),
    Claim(
        "Table 7, baseline",
        "REINFORCE++ is slightly worse than GRPO",
        (ahead("reinforce++", "grpo", sign=-1),),
        "the same number of optimizer steps",
    ),
    Claim(
        "Table 7, AR and Lopti",
        "AR and Lopti together improve REINFORCE++ (3B: 0.23 to 0.41)",
        (
            ahead("reinforce++ ar+lopti", "reinforce++"),
            ahead("reinforce++ ar+lopti", "grpo 4 updates", is_control=True),
        ),
        "with Lopti there are twice as many optimizer steps; GRPO with 4 updates makes as many",
    ),
    Claim(
        "Table 7, one alone",
        "so does each alone",
        (Unmeasured("python reinforce_pp_ar_lopti.py --alpha 0.1 --eta 0 --steps 360"),),
        "Lopti alone: `--alpha 0 --eta 0.5`",
    ),
    Claim("Figure 12", "Table 7's runs of 3B over time", (Unmeasured("python reinforce_pp.py --steps 360"),), BIG),
    Claim("Figure 13", "Table 7's runs of 7B over time", (Unmeasured(),), BIG),
    Claim(
        "Table 8, AR and Lopti",
        "AR and Lopti together improve DAPO (3B: 0.49 to 0.74)",
        (ahead("dapo ar+lopti", "dapo"), ahead("dapo ar+lopti", "grpo 4 updates", is_control=True)),
        "with Lopti there are twice as many optimizer steps; GRPO with 4 updates makes as many",
    ),
    Claim(
        "Table 8, one alone",
        "so does each alone",
        (Unmeasured("python dapo_ar_lopti.py --alpha 0.3 --eta 0 --steps 360"),),
        "Lopti alone: `--alpha 0 --eta 0.5`",
    ),
    Claim("Figure 14", "Table 8's runs of 3B over time", (Unmeasured("python dapo.py --steps 360"),), BIG),
    Claim("Figure 15", "Table 8's runs of 7B over time", (Unmeasured(),), BIG),
    Claim(
        "Table 9",
        "AR, Lopti and both improve GRPO with Llama too (3B: 0.30 to 0.40, 0.59, 0.62)",
        (
            Unmeasured(
                "python grpo_ar_lopti.py --model meta-llama/Llama-3.2-3B-Instruct --alpha 0.3 --eta 0.5 --steps 360"
            ),
        ),
        "kk_tiny is a Llama of a million parameters: see Figure 4",
    ),
    Claim("Figure 16", "Table 9's runs of 3B over time", (Unmeasured(),), SHOWN_FOR_GRPO),
    Claim("Figure 17", "Table 9's runs of 8B over time", (Unmeasured(),), SHOWN_FOR_GRPO),
    Claim(
        "Table 10",
        "AR and Lopti improve DeepSeek-R1-Distill-1.5B on ORZ (37.86 to 40.11 and 39.01)",
        (
            Unmeasured(
                "python grpo_ar_lopti.py --task math --model deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B --alpha 0.1"
                " --eta 0"
            ),
        ),
        "it needs a GPU",
    ),
    Claim("Figure 18", "Table 10's runs over time", (Unmeasured(),), "see Table 10"),
    Claim(
        "Figure 19, up to 8 updates",
        "the 80/20 rule harms at 2, 4 and 8 updates a step",
        tuple(Ahead("updates", f"{n} updates, 80/20", f"{n} updates", sign=-1) for n in (2, 4, 8)),
        "the paper runs the rule on DAPO, here it is on GRPO",
    ),
    Claim(
        "Figure 19, 16 updates",
        "the 80/20 rule helps at 16 updates a step",
        (Ahead("updates", "16 updates, 80/20", "16 updates"),),
        "on GRPO, as above",
    ),
)

ACPO = (
    Claim(
        "Figure 1(a)",
        "emphasising tokens of high entropy helps",
        tuple(Ahead("updates", f"{n} updates, 80/20", f"{n} updates") for n in (2, 16)),
        "near on-policy and off policy; that improbable tokens over-dominate is AR-Lopti's Figure 1",
    ),
    Claim(
        "Figure 1(b)",
        "which tokens dominate shifts with the number of updates",
        (Lab("off_policy", ("the share of improbable tokens",)),),
        "four batches, each from its first update to its last",
    ),
    Claim(
        "Figure 1(c)",
        "ACPO is ahead of fixed clips, near on-policy and off policy",
        (
            ahead("acpo", "dapo"),
            ahead("acpo", "cispo"),
            Ahead("clip", "acpo, 16 updates", "grpo's clip, 16 updates"),
            Ahead("clip", "acpo, 16 updates", "dapo's clip, 16 updates"),
        ),
        "the first two differ from ACPO in more than the clip (mean over responses, KL term), the last two in nothing "
        "else",
    ),
    Claim("eq. 1", "GRPO as a mean over responses", (Where("acpo.py", "policy_loss"),), "`--clip_alpha 0`"),
    Claim(
        "eq. 2, 37, 38",
        "clipped tokens have no gradient, the others ρ·A·∇ log π",
        (Test("test_lab.py", "test_tokens_beyond_the_clip_have_no_weight"),),
        "read off the scripts' own updates",
    ),
    Claim(
        "eq. 3, 39",
        "at its own logit a token's gradient is 1 − π",
        (Test("test_lab.py", "test_the_gradient_at_the_logits_is_one_hot_minus_p"),),
        "the other logits have gradients too, which G leaves out",
    ),
    Claim(
        "Figure 2(a)",
        "ρ of improbable tokens spreads more",
        (Lab("off_policy", ("ρ of improbable tokens",)),),
        "σ of ρ after the last update",
    ),
    Claim(
        "Lemma 1, eq. 4, 9–36",
        "the variance of ρ is κ²(1 − π)⁴",
        (Lab("off_policy", ("σ² of ρ grows as (1 − π)⁴",)),),
        "the derivation moves the logits alone; here all weights move, and tokens move each other",
    ),
    Claim(
        "Proposition 1, eq. 5, 6, 40–53",
        "the expected gradient of a token by its π, κ and the clip",
        (Test("test_lab_off_policy.py", "test_grpos_mean_weight_is_that_of_the_proposition_under_its_assumptions"),),
        "for normal, independent ρ and A, and with signs: where the clip cuts off nothing the mean is 0, whatever the "
        "sizes; the derivation of Remark 1 has Φ(−ε_l/σ) (eq. 56), with which the test would fail",
    ),
    Claim(
        "Remark 1 (1), eq. 54–69",
        "near on-policy improbable tokens dominate",
        (Lab("off_policy", ("near on-policy improbable tokens dominate",)),),
        "in two ways: the mean gradient's norm, and the mean size of eq. 3",
    ),
    Claim(
        "Remark 1 (2)",
        "far off policy probable tokens dominate",
        (Lab("off_policy", ("far off policy probable tokens dominate",)),),
        "the same two ways; by eq. 6 itself it can't be, only with eq. 56's other sign: lab/README.md",
    ),
    Claim(
        "Figure 2(b)",
        "so the dominance reverses with the number of updates",
        (Lab("off_policy", ("near on-policy improbable tokens dominate", "far off policy probable tokens dominate")),),
        "both parts of Remark 1",
    ),
    Claim(
        "Figure 2(c), correlation",
        "the less probable a token, the higher the entropy",
        (
            Lab("off_policy", ("the less probable a token, the higher the entropy",)),
            Lab("forking_tokens", ("the tokens of highest entropy are mostly those of lowest probability",)),
        ),
        "over all tokens, and for the fifths of highest entropy and lowest probability",
    ),
    Claim(
        "Figure 2(c), clipped tokens",
        "the clip falls on improbable tokens of low entropy",
        (Lab("off_policy", ("the clip cuts off mostly improbable", "and of these more at low entropy")),),
        "after the last update",
    ),
    Claim(
        "Appendix C, bounds",
        "a token's entropy lies between two functions of its probability",
        (Lab("forking_tokens", ("every token's entropy is within the bounds",)),),
        "they hold for every distribution, so this checks the measurement",
    ),
    Claim(
        "eq. 7",
        "principal angles between two gradients' largest directions",
        (Where("lab/key_factors.py", "principal_angles"),),
        "`lab.who_dominates` has the plain angle between whole gradients",
    ),
    Claim(
        "Figure 4, left: probability",
        "p < 0.2 gives a gradient larger than that of p > 0.8 (409 % and 50 % of the whole), and closer to it",
        (
            Lab("who_dominates", ("the gradient of p < 0.2 is larger",)),
            Lab("key_factors", ("the gradient of p < 0.2 is larger",)),
        ),
        "Appendix D.1; lab.who_dominates has the plain angle, lab.key_factors the principal angles of eq. 7",
    ),
    Claim(
        "Figure 4, left: entropy",
        "tokens of high entropy give a large gradient (340 %), less aligned than that of improbable ones",
        (Lab("key_factors", ("the gradient of the highest entropies",)),),
        "Appendix D.1; principal angles, as in eq. 7",
    ),
    Claim(
        "Figure 4, middle",
        "negative advantages give a gradient as large as positive ones, and closer to the whole (28.0°, 40.5°)",
        (Lab("key_factors", ("the gradient of A < 0 is closer", "the gradients of A > 0 and A < 0")),),
        "Appendix D.2; principal angles",
    ),
    Claim(
        "Figure 4, right: no clip",
        "without the clip the gradient's norm explodes (20,177 %)",
        (Lab("key_factors", ("without clip the norm explodes",)),),
        "Appendix D.3, off policy",
    ),
    Claim(
        "Figure 4, right: GRPO",
        "off policy GRPO's gradient has the on-policy gradient's size, and another direction (47.4°)",
        (Lab("key_factors", ("the on-policy gradient has GRPO's",)),),
        "Appendix D.3; principal angles",
    ),
    Claim(
        "Figure 4, right: CISPO, DAPO",
        "CISPO's gradient is far larger (3,268 %) and turned, clip-higher changes next to nothing",
        (Lab("key_factors", ("CISPO's gradient is much larger", "a higher ε_high (DAPO) hardly")),),
        "Appendix D.3, off policy",
    ),
    Claim(
        "eq. 8",
        "ACPO's clip range of a bin is ε + α·σ",
        (Test("test_lab.py", "test_acpos_range_is_wider_in_a_bin_whose_ratios_spread"),),
        "σ of the whole mini-batch's tokens",
    ),
    Claim(
        "Table 1(a)",
        "ACPO is ahead of DAPO and CISPO on Countdown (16 updates: 76.27, 74.38, 55.12)",
        (Unmeasured("python acpo.py --task countdown --updates_per_step 16 --prompts_per_step 256"),),
        BIG,
    ),
    Claim(
        "Table 1(b)",
        "ACPO is ahead on HiTab (3B, 2 updates: 45.50, DAPO 44.33)",
        (Unmeasured("python acpo.py --task hitab"),),
        BIG,
    ),
    Claim(
        "Table 2",
        "ACPO is ahead on mathematics (mean 42.90, DAPO 42.40, CISPO 42.47)",
        (Unmeasured("python acpo.py --task math"),),
        BIG,
    ),
    Claim("Figure 3", "Table 1(a)'s runs over time", (Unmeasured("python acpo.py --task countdown"),), BIG),
    Claim(
        "Table 3, off policy: ACPO",
        "ACPO is ahead of DAPO's clip (76.27, 74.38)",
        (Ahead("clip", "acpo, 16 updates", "dapo's clip, 16 updates"),),
        "only the clip differs; K&K with kk_tiny in place of Countdown",
    ),
    Claim(
        "Table 3, off policy: largest",
        "DAPO with ACPO's largest clip range above is ahead of DAPO, and behind ACPO (75.86)",
        (
            Ahead("clip", "dapo, clip-high at acpo's largest, 16 updates", "dapo's clip, 16 updates"),
            Ahead("clip", "dapo, clip-high at acpo's largest, 16 updates", "acpo, 16 updates", sign=-1),
        ),
        "the largest range of ACPO's run with seed 0",
    ),
    Claim(
        "Table 3, off policy: average",
        "GRPO with ACPO's average clip range is behind DAPO's clip (74.16)",
        (Ahead("clip", "grpo, clip at acpo's average, 16 updates", "dapo's clip, 16 updates", sign=-1),),
        "the paper finds that average narrower than GRPO's range; here it is wider, 0.257",
    ),
    Claim(
        "Table 3, near on-policy",
        "the same order with 2 updates",
        (Unmeasured("python acpo.py --task countdown --updates_per_step 2"),),
        "the clip matters only if tokens move far, so the suite has 16 updates a step",
    ),
)

NOTES = (
    Claim(
        "grpo-1.png, grpo-2.png",
        "GRPO's objective, and its gradient with 1/π_old and A as factors",
        (Where("grpo.py", "policy_loss"),),
        "see AR-Lopti's eq. 1 and 2",
    ),
    Claim(
        "DAPO's clip",
        "a higher upper bound of the clip improves reasoning",
        (Ahead("clip", "dapo's clip, 16 updates", "grpo's clip, 16 updates"),),
        "0.3 in place of 0.2, as mean over responses, off policy",
    ),
    Claim(
        "low_prob_overdominate.png",
        "improbable tokens, 19.22 % of all, have the largest part of the gradient norms",
        (Lab("who_dominates", ("improbable tokens (p ≤ 0.25) have the largest part",)),),
        "AR-Lopti's Figure 1",
    ),
    Claim(
        "gspo_loss.png",
        "GSPO's objective: one ratio for a response, the geometric mean of its tokens'",
        (Where("gspo.py", "policy_loss"), Test("test_cispo_gspo.py", "test_gspos_loss_and_gradient_by_hand")),
        "its bounds are GSPO's own",
    ),
    Claim(
        "gspo_gradient.png, grpo_gradient.png",
        "in GSPO all tokens of a response have the same factor, in GRPO each its own",
        (
            Test("test_lab.py", "test_gspo_cuts_whole_responses"),
            Test("test_lab.py", "test_tokens_beyond_the_clip_have_no_weight"),
        ),
        "read off the scripts' own updates",
    ),
    Claim(
        "geometric mean",
        "a geometric mean feels outliers less than an arithmetic one",
        (
            Test(
                "test_cispo_gspo.py",
                "test_an_outlier_above_weighs_less_in_gspos_mean_than_in_grpos_and_one_below_more",
            ),
        ),
        "true of a ρ far above 1; one far below 1 moves the geometric mean further than the arithmetic one",
    ),
    Claim(
        "entropy of improbable tokens",
        "an improbable token is likely to be one of high entropy",
        (Lab("forking_tokens", ("the tokens of highest entropy are mostly those of lowest probability",)),),
        "the fifths of highest entropy and lowest probability",
    ),
    Claim(
        "forking tokens",
        "most tokens have an entropy near 0, and a few have most of it",
        (Lab("forking_tokens", ("most tokens have an entropy near 0", "20% of the tokens have at least")),),
        "a fifth of the tokens, four fifths of the entropy",
    ),
    Claim(
        "20_80_words.png",
        "words that connect steps of reasoning have a high entropy",
        (Lab("forking_tokens", ("words that connect steps",)),),
        "words of AR-Lopti's Table 5 that stand alone; in kk_tiny most forks are wordings that it was taught",
    ),
    Claim(
        "kuaishou_words.png",
        "tokens of high entropy guide what comes next: they begin a sentence or a line",
        (Lab("forking_tokens", ("tokens that begin a step",)),),
        "that these have more entropy than others is measured; what they lead to is not",
    ),
    Claim(
        "80/20, accuracy",
        "the fifth of highest entropy alone learns more than all tokens do",
        tuple(Ahead("updates", f"{n} updates, 80/20", f"{n} updates") for n in (2, 4, 8, 16)),
        "to learn as much is not enough for the claim",
    ),
    Claim(
        "80/20, length",
        "and its responses are longer",
        tuple(Ahead("updates", f"{n} updates, 80/20", f"{n} updates", key="response_tokens") for n in (2, 4, 8, 16)),
        "at 2, 4, 8 and 16 updates a step",
    ),
    Claim("80/20, model size", "the more so, the larger the model", (Unmeasured(),), "there is one model"),
    Claim(
        "Archer",
        "a wider clip and no KL term for tokens of high entropy improve GRPO",
        (ahead("archer", "grpo"),),
        "2 updates a step, as in the other entries of the suite",
    ),
)

PAPERS = {
    "AR-Lopti": ("*Do Not Let Low-Probability Tokens Over-Dominate in RL for LLMs*, arXiv 2505.12929", AR_LOPTI),
    "ACPO": ("*What Are Key Factors for Updates in RL for LLM Reasoning?*, arXiv 2606.22570", ACPO),
    "Notes": ("Dong's notes on token-level reinforcement learning, by the names of their figures", NOTES),
}


# ---------------------------------------------------------------------------------------------------------------- page


def page(folders=Folders()):
    """docs/claims.md: what the words mean, a table for each paper, what else the lab found, and where it was read."""
    found = {paper: [(claim, judged(claim, folders)) for claim in claims] for paper, (_, claims) in PAPERS.items()}
    words = [finding.word for rows in found.values() for _, finding in rows]
    intro = [
        "# Claims",
        "Every figure, table, equation and numbered statement of the two papers, and the figures and statements of the "
        "notes: what it says, which command measures it here, and what came out. `python -m tools.claims` writes this "
        "page from the kept results; no verdict is written by hand.",
        "**What was measured is small**: models/kk_tiny, a Llama of a million parameters, learning Knights & Knaves "
        "puzzles of 2 and 3 people for 8, 12 or 40 steps on two cores; Figure 11 and Table 6 of AR-Lopti have "
        "SmolLM2-135M. That a claim does not show here says little about "
        "models of 3 billion parameters that learn for 360 steps. A claim that shows here is no proof for them either.",
    ]
    lines = []
    for paragraph in intro:
        lines += [*textwrap.wrap(paragraph, 120, break_on_hyphens=False), ""]
    lines += ["| verdict | rows | what it means |", "|---|---|---|"]
    lines += [f"| {word} | {words.count(word)} | {meaning} |" for word, meaning in MEANING.items()]
    rules = (
        f"A difference counts from {ERRORS} standard errors on: of the lab over batches, of runs over {SEEDS} seeds, "
        "where it is a weak test (a 95 % interval needs 4.3: course/lesson_8.md). "
        "Runs are compared by two test accuracies, the mean of a run's last three evaluations (or of all, if there are "
        "fewer) and the last one. A claim shows if both say so, and can't be told if only one does. A row with several "
        "comparisons shows if each of them does. Numbers of runs are differences with the same seed, mean ± standard "
        f"error. Fewer than {SEEDS} seeds can't tell."
    )
    lines += ["", *textwrap.wrap(rules, 120, break_on_hyphens=False)]
    lines += ["", "## In short", ""]
    for word in (SHOWS, DOES_NOT_SHOW, CANNOT_TELL):
        items = {paper: [claim.item for claim, of in rows if of.word == word] for paper, rows in found.items()}
        text = ". ".join(f"{paper}: {'; '.join(names)}" for paper, names in items.items() if names)
        lines += textwrap.wrap(f"- **{word}**: {text}.", 120, break_on_hyphens=False, subsequent_indent="  ")
    for paper, (title, _) in PAPERS.items():
        lines += ["", f"## {paper}", "", *textwrap.wrap(f"{title}.", 120), ""]
        lines += [
            "| item | what it says (with the paper's numbers) | command | what came out here | note |",
            "|---|---|---|---|---|",
        ]
        for claim, finding in found[paper]:
            commands = dict.fromkeys(filter(None, (source.command() for source in claim.sources)))
            numbers = f": {finding.numbers}" if finding.numbers else ""
            cells = [claim.item, claim.says, ", ".join(commands), f"**{finding.word}**{numbers}", claim.why]
            lines.append(row(cells))
    lines += ["", "## What else the lab found", ""]
    rest = "Verdicts of the lab that belong to no row above."
    lines += [rest, "", "| command | claim | what came out here |", "|---|---|---|"]
    for name, claim, word, numbers in unused(folders):
        lines.append(row([f"`python -m lab.{name}`", claim, f"**{word}**: {numbers}"]))
    return "\n".join([*lines, "", *read_from(folders)]) + "\n"


def row(cells):
    """A row of a table; a bar inside a cell would end it."""
    return "| " + " | ".join(cell.replace("|", "∣") for cell in cells) + " |"


def unused(folders):
    """[(name, claim, word, numbers)]: the lab's verdicts that no claim asks for."""
    asked = [source for _, claims in PAPERS.values() for claim in claims for source in claim.sources]
    used = {(s.name, verdict[0]) for s in asked if isinstance(s, Lab) for verdict in s.verdicts(folders)}
    rows = []
    for path in sorted(folders.lab.glob("*.json")):
        rows += [(path.stem, *verdict) for verdict in read_lab(path) if (path.stem, verdict[0]) not in used]
    return rows


def read_from(folders):
    """The section on the results: of each the commit, the machine and the date."""
    lines = ["## Where this was read", "", "| result | commit | machine | date |", "|---|---|---|---|"]
    paths = sorted(folders.lab.glob("*.json")) + [path for path in (folders.times, folders.words) if path.exists()]
    for path in paths:
        about = json.loads(path.read_text(encoding="utf-8"))
        about = about.get("provenance", about)
        name = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
        lines.append(row([f"[`{name}`](../{name})", *(str(about.get(key)) for key in ("commit", "machine", "date"))]))
    suites = {}
    for _, claims in PAPERS.values():
        for source in [source for claim in claims for source in claim.sources if isinstance(source, Ahead)]:
            for entry in (source.entry, source.base):
                suites.setdefault(source.suite, {})[entry] = kept_runs(folders.runs, source.suite, entry)
    for suite, entries in sorted(suites.items()):
        runs = [run for by_seed in entries.values() for run in by_seed.values()]
        values = [", ".join(sorted({str(run[key]) for run in runs})) for key in ("commit", "machine", "date")]
        file = f"benchmarks/kk_tiny/{suite}.md"
        name = f"[`{file}`](../{file})" if (ROOT / file).is_file() else f"suite {suite}"
        lines.append(row([f"{name}: {len(runs)} kept runs", *values]))
    return lines


# ---------------------------------------------------------------------------------------------------------------- main


@dataclass
class Args:
    """Where the page goes."""

    check: bool = False  # only check if the file is up to date
    file: Path = FILE  # the file to write


def main(args):
    generated.keep({args.file: page()}, args.check, "python -m tools.claims")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__.split("\n\n")[0], use_underscores=True))
