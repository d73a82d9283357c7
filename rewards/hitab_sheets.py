"""Invent tables in HiTab's form, with two levels of headers on both sides, and questions about them."""

# The columns of a table: the words for both levels, how a question names a column, labels of both levels.
from random import Random

TIMES = [
    {
        "levels": ("year", "quarter"),
        "name": "{lower} of {upper}",
        "uppers": ["2018", "2019", "2020", "2021", "2022", "2023"],
        "lowers": ["Q1", "Q2", "Q3", "Q4"],
    },
    {
        "levels": ("year", "season"),
        "name": "{lower} of {upper}",
        "uppers": ["2018", "2019", "2020", "2021", "2022", "2023"],
        "lowers": ["spring", "summer", "autumn", "winter"],
    },
    {
        "levels": ("year", "month"),
        "name": "{lower} of {upper}",
        "uppers": ["2020", "2021", "2022", "2023", "2024"],
        "lowers": ["March", "April", "May", "June", "July"],
    },
    {
        "levels": ("day", "time"),
        "name": "the {lower} of {upper}",
        "uppers": ["Monday", "Tuesday", "Wednesday", "Thursday"],
        "lowers": ["morning", "afternoon", "evening"],
    },
]
TOWNS = {
    "North": ["Aldby", "Corfield", "Marle", "Tarnby"],
    "South": ["Osker", "Rydale", "Velmore", "Windle"],
    "East": ["Brenby", "Haddow", "Lunden", "Skerrow"],
    "West": ["Calder", "Farrow", "Inmoor", "Pennick"],
}
GOODS = {
    "kitchen": ["kettles", "mixers", "ovens", "pans"],
    "garden": ["hoses", "mowers", "pots", "spades"],
    "office": ["desks", "lamps", "printers", "shelves"],
    "sports": ["balls", "bikes", "rackets", "skis"],
}
CLUBS = ["chess", "choir", "drama", "judo", "robotics"]
SCHOOLS = {"Elm School": CLUBS, "Hill School": CLUBS, "Lake School": CLUBS}
AGES = ["15-24", "25-44", "45-64", "65+"]
SEXES = {"women": AGES, "men": AGES}
FARES = ["adults", "children", "pensioners"]
VEHICLES = {"bus": FARES, "ferry": FARES, "train": FARES, "tram": FARES}
# The rows: the same, plus the preposition in front of a row's name, the counted things, and the kind of numbers.
THINGS = [
    {
        "levels": ("region", "town"),
        "name": "{lower} ({upper})",
        "preposition": "in",
        "labels": TOWNS,
        "measures": ["number of visitors", "number of new homes", "number of bicycles sold"],
        "numbers": "whole",
    },
    {
        "levels": ("region", "town"),
        "name": "{lower} ({upper})",
        "preposition": "in",
        "labels": TOWNS,
        "measures": ["amount of waste in tonnes", "use of power in GWh", "rainfall in centimetres"],
        "numbers": "decimal",
    },
    {
        "levels": ("department", "product"),
        "name": "{lower} ({upper})",
        "preposition": "for",
        "labels": GOODS,
        "measures": ["revenue in euros", "cost in euros", "number of items in stock"],
        "numbers": "large",
    },
    {
        "levels": ("school", "club"),
        "name": "{lower} at {upper}",
        "preposition": "for",
        "labels": SCHOOLS,
        "measures": ["number of new members", "number of meetings"],
        "numbers": "small",
    },
    {
        "levels": ("sex", "age"),
        "name": "{upper} aged {lower}",
        "preposition": "among",
        "labels": SEXES,
        "measures": ["number of volunteers", "number of patients"],
        "numbers": "large",
    },
    {
        "levels": ("vehicle", "fare"),
        "name": "{lower} by {upper}",
        "preposition": "for",
        "labels": VEHICLES,
        "measures": ["number of tickets", "number of journeys"],
        "numbers": "whole",
    },
]
RANGES = {"small": (3, 60), "whole": (20, 999), "large": (500, 9999), "decimal": (11, 999)}  # decimal: in tenths
# Rows per group, columns per group (two groups each), whether the table has row totals, and column totals. Larger
# tables need prompts of over 900 tokens with kk_tiny's tokenizer, which has a token for almost every letter.
SHAPES = [
    (2, 2, False, False),
    (2, 2, True, False),
    (2, 2, False, True),
    (3, 2, False, False),
    (2, 3, False, False),
]


def make_sheet(rng: Random) -> dict:
    """Return the content of a random table, a dict.

    - `rows`, `columns`: the (upper label, lower label) of each row and column, without totals
    - `values`: per row, a list of whole numbers, one per column; they are tenths if `numbers` is "decimal"
    - `row_totals`, `column_totals`: True if the table has extra rows (columns) with the totals of each group and of all
    - `things`, `times`: one of THINGS and one of TIMES
    - `measure`, `numbers`: the quantity, and its kind of numbers
    """
    things, times = rng.choice(THINGS), rng.choice(TIMES)
    n_rows, n_columns, row_totals, column_totals = rng.choice(SHAPES)
    rows, columns = [], []
    for group in rng.sample(list(things["labels"]), 2):
        members = things["labels"][group]
        for i in sorted(rng.sample(range(len(members)), n_rows)):
            rows.append((group, members[i]))
    first_upper = rng.randint(0, len(times["uppers"]) - 2)
    first_lower = rng.randint(0, len(times["lowers"]) - n_columns)
    for upper in times["uppers"][first_upper : first_upper + 2]:
        for lower in times["lowers"][first_lower : first_lower + n_columns]:
            columns.append((upper, lower))
    smallest, largest = RANGES[things["numbers"]]
    return {
        "rows": rows,
        "columns": columns,
        "values": [[rng.randint(smallest, largest) for _ in columns] for _ in rows],
        "row_totals": row_totals,
        "column_totals": column_totals,
        "things": things,
        "times": times,
        "measure": rng.choice(things["measures"]),
        "numbers": things["numbers"],
    }


def layout(sheet) -> dict:
    """Return the sheet as a table in the release's layout (see `markdown`), with merged headers and its totals."""
    rows = lines_of(sheet["rows"], sheet["row_totals"])
    columns = lines_of(sheet["columns"], sheet["column_totals"])
    levels = sheet["things"]["levels"]
    by_row = add_up(sheet["values"], rows)
    by_column = add_up(list(zip(*by_row)), columns)  # per column of the table, the list of its values
    texts = [[*levels, *("" for _ in columns)], ["", "", *(lower for _, lower, _ in columns)]]
    for (_, lower, _), line in zip(rows, zip(*by_column)):
        texts.append(["", lower, *(in_digits(sheet, value) for value in line)])
    regions = []  # only the first line of a group has its upper label
    for first, last in groups_of(rows):
        texts[2 + first][0] = rows[first][0]
        regions.append({"first_row": 2 + first, "last_row": 2 + last, "first_column": 0, "last_column": 0})
    for first, last in groups_of(columns):
        texts[0][2 + first] = columns[first][0]
        regions.append({"first_row": 0, "last_row": 0, "first_column": 2 + first, "last_column": 2 + last})
    title = f"{sheet['measure']} by {' / '.join(levels)} and {' / '.join(sheet['times']['levels'])}"
    return {
        "title": title[0].upper() + title[1:],
        "texts": texts,
        "merged_regions": regions,
        "top_header_rows_num": 2,
        "left_header_columns_num": 2,
    }


def lines_of(labels, totals):
    """Return one side's lines, [(upper label, lower label, places of the labels that the line adds up)].

    In: `labels`, (upper, lower) of the lines without totals; `totals`: whether each group and the table have a total.
    """
    lines = []
    for group in dict.fromkeys(upper for upper, _ in labels):
        places = places_of(labels, group)
        lines += [(group, labels[place][1], [place]) for place in places]
        if totals:
            lines.append((group, "total", places))
    if totals:
        lines.append(("total", "", list(range(len(labels)))))
    return lines


def add_up(values, lines):
    """Return, per line from `lines_of`, the sums of the rows of `values` that the line adds up."""
    sums = []
    for _, _, places in lines:
        if len(places) == 1:
            sums.append(values[places[0]])
        else:
            sums.append([sum(parts) for parts in zip(*(values[place] for place in places))])
    return sums


def places_of(labels, group) -> list:
    """Return the places of the group's members in a list of (upper label, lower label)."""
    return [place for place, (upper, _) in enumerate(labels) if upper == group]


def groups_of(lines):
    """Return [(first line, last line)] of each group of neighbours with the same upper label."""
    groups = []
    for i, line in enumerate(lines):
        if i == 0 or line[0] != lines[i - 1][0]:
            groups.append((i, i))
        groups[-1] = (groups[-1][0], i)
    return groups


def total(sheet, rows, columns):
    """Return the sum of the values in these rows and columns, without totals; in tenths if the numbers are decimal."""
    return sum(sheet["values"][i][j] for i in rows for j in columns)


def in_digits(sheet, value) -> str:
    """Format a value as the table shows it: 12.5 for 125 tenths, 1,234 for a large number."""
    if sheet["numbers"] == "decimal":
        return f"{value / 10:.1f}"
    return f"{value:,}" if sheet["numbers"] == "large" else str(value)


def in_answer(sheet, value):
    """Return a value as an answer: 12.5 for 125 tenths."""
    return value / 10 if sheet["numbers"] == "decimal" else value


def name_row(sheet, i) -> str:
    """Name a row as a question does, such as "in Aldby (North)"."""
    upper, lower = sheet["rows"][i]
    return f"{sheet['things']['preposition']} {sheet['things']['name'].format(upper=upper, lower=lower)}"


def name_column(sheet, j):
    """Name a column as a question does, such as "Q1 of 2020"."""
    upper, lower = sheet["columns"][j]
    return sheet["times"]["name"].format(upper=upper, lower=lower)


def two_of(rng: Random, labels) -> list:
    """Return the places of two lines, in their order."""
    return sorted(rng.sample(range(len(labels)), 2))


def ask_lookup(rng: Random, sheet) -> tuple:
    """Ask for a number that the table shows, or for two of them: (the question, the answer)."""
    measure = sheet["measure"]
    i, j = rng.randrange(len(sheet["rows"])), rng.randrange(len(sheet["columns"]))
    row, column = name_row(sheet, i), name_column(sheet, j)
    way = rng.random()
    if way < 0.2:
        j, k = two_of(rng, sheet["columns"])
        question = f"What was the {measure} {row} in {name_column(sheet, j)}, and what in {name_column(sheet, k)}?"
        return question, [in_answer(sheet, sheet["values"][i][place]) for place in (j, k)]
    if way < 0.4 and sheet["row_totals"]:
        group = sheet["rows"][i][0]
        question = f"What was the {measure} {sheet['things']['preposition']} {group} as a whole in {column}?"
        return question, [in_answer(sheet, total(sheet, places_of(sheet["rows"], group), [j]))]
    if way < 0.4 and sheet["column_totals"]:
        group = sheet["columns"][j][0]
        question = f"What was the {measure} {row} over the whole of {group}?"
        return question, [in_answer(sheet, total(sheet, [i], places_of(sheet["columns"], group)))]
    wordings = [
        f"What was the {measure} {row} in {column}?",
        f"In {column}, what was the {measure} {row}?",
        f"Find the {measure} {row} in {column}.",
    ]
    return rng.choice(wordings), [in_answer(sheet, sheet["values"][i][j])]


def ask_sum(rng: Random, sheet) -> tuple:
    """Ask for a sum of several values: (the question, the answer)."""
    measure, preposition = sheet["measure"], sheet["things"]["preposition"]
    i, j = rng.randrange(len(sheet["rows"])), rng.randrange(len(sheet["columns"]))
    row, column = name_row(sheet, i), name_column(sheet, j)
    way = rng.choice(["rows", "columns", "row group", "column group"])
    if way == "row group" and not sheet["row_totals"]:
        group = sheet["rows"][i][0]
        question = f"What was the {measure} {preposition} {group} as a whole in {column}?"
        rows, columns = places_of(sheet["rows"], group), [j]
    elif way == "column group" and not sheet["column_totals"]:
        group = sheet["columns"][j][0]
        question = f"What was the {measure} {row} over the whole of {group}?"
        rows, columns = [i], places_of(sheet["columns"], group)
    elif way.startswith("row"):
        rows, columns = two_of(rng, sheet["rows"]), [j]
        first, second = (name_row(sheet, place) for place in rows)
        wordings = [
            f"What was the {measure} {first} and {second} together in {column}?",
            f"Add the {measure} {first} and {second} in {column}.",
        ]
        question = rng.choice(wordings)
    else:
        rows, columns = [i], two_of(rng, sheet["columns"])
        first, second = (name_column(sheet, place) for place in columns)
        wordings = [
            f"What was the {measure} {row} in {first} and {second} together?",
            f"Taking {first} and {second} together, what was the {measure} {row}?",
        ]
        question = rng.choice(wordings)
    return question, [in_answer(sheet, total(sheet, rows, columns))]


def ask_difference(rng: Random, sheet) -> tuple:
    """Ask for the difference of two numbers: (the question, the answer), with the answer None if it is 0."""
    measure, values = sheet["measure"], sheet["values"]
    i, j = rng.randrange(len(sheet["rows"])), rng.randrange(len(sheet["columns"]))
    if rng.random() < 0.5:
        before, after = two_of(rng, sheet["columns"])
        change = values[i][after] - values[i][before]
        times = f"from {name_column(sheet, before)} to {name_column(sheet, after)}"
        wordings = [
            f"By how much did the {measure} {name_row(sheet, i)} change {times}? A fall is a negative number.",
            f"{times[0].upper()}{times[1:]}, what was the change in the {measure} {name_row(sheet, i)}? "
            "A fall is a negative number.",
        ]
        return rng.choice(wordings), [in_answer(sheet, change)] if change else None
    less, more = sorted(two_of(rng, sheet["rows"]), key=lambda place: values[place][j])
    difference = values[more][j] - values[less][j]
    less, more = name_row(sheet, less), name_row(sheet, more)
    wordings = [
        f"How much higher was the {measure} {more} than {less} in {name_column(sheet, j)}?",
        f"In {name_column(sheet, j)}, how much lower was the {measure} {less} than {more}?",
    ]
    return rng.choice(wordings), [in_answer(sheet, difference)] if difference else None


def ask_comparison(rng: Random, sheet) -> tuple:
    """Ask for a label: (the question, the answer), with the answer None if two numbers are equal."""
    measure, (upper, lower) = sheet["measure"], sheet["things"]["levels"]
    i, j = rng.randrange(len(sheet["rows"])), rng.randrange(len(sheet["columns"]))
    (group, _), (_, part) = sheet["rows"][i], sheet["columns"][j]
    column = name_column(sheet, j)
    highest = rng.random() < 0.5
    best, better = ("highest", "higher") if highest else ("lowest", "lower")
    values, wanted = {}, 1  # {label: compared value}; how many labels the answer has
    way = rng.choice(["members", "two members", "groups", "times"])
    if way == "groups":
        for label in dict.fromkeys(group for group, _ in sheet["rows"]):
            values[label] = total(sheet, places_of(sheet["rows"], label), [j])
        question = f"Which {upper} as a whole had the {better} {measure} in {column}?"
    elif way == "times":
        for place, (label, its_part) in enumerate(sheet["columns"]):
            if its_part == part:
                values[label] = sheet["values"][i][place]
        time = sheet["times"]["levels"][0]
        question = f"Looking only at {part}, in which {time} was the {measure} {name_row(sheet, i)} {better}?"
    else:
        for place in places_of(sheet["rows"], group):
            values[sheet["rows"][place][1]] = sheet["values"][place][j]
        wordings = [
            f"Which {lower} within {group} had the {best} {measure} in {column}?",
            f"In {column}, which {lower} within {group} had the {best} {measure}?",
        ]
        question = rng.choice(wordings)
        if way == "two members" and len(values) > 2:
            question = f"Which two {lower}s within {group} had the {best} {measure} in {column}?"
            wanted = 2
    if len(set(values.values())) < len(values):
        return question, None
    return question, sorted(values, key=values.get, reverse=highest)[:wanted]
