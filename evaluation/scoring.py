"""Score responses, and make a table row of them."""

from itertools import chain
from pathlib import Path

from evaluation import figures, words
from evaluation.sampling import respond
from rewards import scores_of, with_ended


def evaluate(model, paths, task, problems, plans, columns, args) -> tuple:
    """Return (a row of the table, {column: the problems' contributions}, each problem's scored responses).

    paths: the model's checkpoints; plans: {checkpoint: (its requests, its plan)}.
    """
    row = {"model": model, "checkpoints": [], "figures": {}}
    if Path(paths[0]) != Path(model).expanduser():
        row["model"] += f": {', '.join(Path(path).name for path in paths)}"
    scored = []  # per checkpoint, per problem, the responses with their scores
    for path in paths:
        responses, about = respond(path, task, *plans[path], args)
        row["checkpoints"].append(about)
        origin = {"model": row["model"], "checkpoint": path}
        scored.append(score(task, problems, responses, origin))

    values = {}
    names = figures.names_of(columns, problems)
    for key, column in columns.items():
        values[key], noise = figures.contributions(column, problems, scored)
        row["figures"][key] = figures.figure(values[key], noise, names[key])
    if "all" not in columns:
        row["figures"]["mean"] = figures.mean_figure(columns, values, names)

    by_problem = []  # the responses of all checkpoints
    by_category = {}
    for problem, *of_checkpoints in zip(problems, *scored):
        of_problem = list(chain(*of_checkpoints))
        by_problem.append(of_problem)
        by_category.setdefault(problem["category"], []).extend(of_problem)
    row.update(figures.rates(list(chain(*by_problem))))
    row["by_category"] = {name: figures.rates(some) for name, some in by_category.items()}
    return row, values, by_problem


def score(task, problems, responses, origin):
    """Return each problem's responses with their scores, as --keep_responses writes them.

    responses: a list per problem; origin: a dictionary, the first part of each result.
    """
    everything = list(chain(*responses))
    conversations = [one.get("turns", [one["response"]]) for one in everything]
    answers = []
    more = []  # what score_conversation may name, too
    for problem, of_problem in zip(problems, responses):
        answers += [problem["answer"]] * len(of_problem)
        for one in of_problem:
            about = {"problem": problem, "replies": one.get("replies", []), "truncated": one["truncated"]}
            more.append(about)
    if everything and "score" in everything[0]:  # of a Conversation, which is gone
        found = with_ended([one.pop("score") for one in everything])
    else:
        found = scores_of(task, conversations, answers, more)
    scores = iter(found)
    scored = []
    for i, (problem, of_problem) in enumerate(zip(problems, responses)):
        about = {
            **origin,
            "problem": i,
            "category": problem["category"],
            "prompt": problem["messages"][-1]["content"],
            "answer": problem["answer"],
        }
        scored.append([about | one | next(scores) for one in of_problem])
    return scored


def compare_with_last(rows, values, columns, problems):
    """Compare each row with the last, problem by problem; a list of comparisons. values: one per row."""
    comparisons = []
    names = figures.names_of(columns, problems)
    for row, of_columns in zip(rows[:-1], values):
        found = figures.paired(columns, of_columns, values[-1], names)
        comparison = {"model": row["model"], "versus": rows[-1]["model"], "figures": found}
        comparisons.append(comparison)
    return comparisons


def add_words(rows, responses, args) -> None:
    """Add to each row its counts of words of reasoning, and their difference from another row's.

    The other row is --versus's, which is the last; without --versus it is the first.
    responses: per row, per problem a list.
    """
    counted = [words.count_all(of_model) for of_model in responses]
    names = [words.name_of(of_problem) for of_problem in responses[0]]
    base = -1 if args.versus else 0
    for row, (counts, relations) in zip(rows, counted):
        row["words"] = {}
        for family in counts:
            row["words"][family] = figures.figure(counts[family], names=names) | relations[family]
        if row is rows[base]:
            continue
        row["words_change"] = {}
        for family, of_base in counted[base][0].items():
            differences = [a - b for a, b in zip(counts[family], of_base)]
            row["words_change"][family] = figures.figure(differences, names=names)
