"""Format HiTab's tables, whose headers have several levels, as Markdown with one line of headers."""


def markdown(table) -> str:
    """Return a table in Markdown: its title on top, and one line of headers, in which slashes join the levels.

    In: a table in the layout of the release's tables/raw, a dict. It has
    - `texts`: its rows, lists of texts (or numbers, or None for a blank cell)
    - `title`: a text; may be missing
    - `merged_regions`: a list of {first_row, last_row, first_column, last_column}, counted from 0, the last included.
      Only the first cell of a region has its text. May be missing.
    - `top_header_rows_num`, `left_header_columns_num`: how many rows and columns are headers
    - `top_root`, `left_root`: the headers as trees of {row_index, column_index, children}; the root has -1. May be
      missing. The levels of a left header are often rows of one column, so only the tree shows which row belongs to
      which heading.
    Regions and nodes outside the table don't count.
    If there are trees, they decide how many rows and columns are headers: the first row in the left tree is the first
    row below the top headers. (The release's top_header_rows_num is larger by one.)
    A row of the tree that is only a heading for the rows below it is dropped, because their headers include it.
    Errors: ValueError if the table has a different layout.
    """
    texts = read_texts(table)
    above = read_tree(table, "top_root", "column_index", texts)
    beside = read_tree(table, "left_root", "row_index", texts)
    n_top = min(beside) if beside else read_count(table, "top_header_rows_num", len(texts))
    n_left = min(above) if above else read_count(table, "left_header_columns_num", len(texts[0]))
    filled = fill_regions(table, texts, n_top, n_left)

    corner = [texts[row][column] for column in range(n_left) for row in range(n_top)]
    lines = [[" / ".join(filter(None, corner))]]
    for column in range(n_left, len(texts[0])):
        outside = [texts[i][j] for i, j in above.get(column, []) if j != column]
        cells = [(texts[row][column], filled[row][column]) for row in range(n_top)]
        lines[0].append(join_levels(outside, cells))
    headings = {i for row, path in beside.items() for i, _ in path if i != row}  # rows that other rows belong to
    for row in range(n_top, len(texts)):
        path = beside.get(row, [])
        values = [texts[row][column] for column in range(n_left, len(texts[0])) if (row, column) not in path]
        if row in headings and not any(values):
            continue
        outside = [texts[i][j] for i, j in path if i != row]
        cells = [(texts[row][column], filled[row][column]) for column in range(n_left)]
        lines.append([join_levels(outside, cells), *filled[row][n_left:]])
    if len(lines) == 1:
        raise ValueError("the table has no rows below its headers")

    title = table.get("title") or ""
    if not isinstance(title, str):
        raise ValueError(f"the table's title must be a text, not {title!r}")
    title = " ".join(title.split())
    written = [f"| {' | '.join(line)} |" for line in lines]
    written.insert(1, "|---" * len(lines[0]) + "|")
    return "\n".join([title, "", *written] if title else written)


def join_levels(outside, cells) -> str:
    """Return a one-line header, its levels joined. In: labels of other lines above; (own text, filled text) of cells.

    A text that fills a merged cell is dropped if it already is a level.
    """
    levels = [label for label in outside if label]
    for own, filled in cells:
        if own:
            levels.append(own)
        elif filled and filled not in levels:
            levels.append(filled)
    return " / ".join(levels)


def read_texts(table):
    """Return the table's cells as texts for Markdown, in rows of equal length."""
    rows = table.get("texts") if isinstance(table, dict) else None
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows) or not any(rows):
        raise ValueError("the table must have `texts`, a list of rows, each a list of texts")
    width = max(map(len, rows))
    texts = []
    for row in rows:
        texts.append([""] * width)
        for column, cell in enumerate(row):
            if cell is None:
                cell = ""
            elif isinstance(cell, (int, float)):
                cell = str(cell)
            elif not isinstance(cell, str):
                raise ValueError(f"a cell of the table must be a text, not {cell!r}")
            texts[-1][column] = " ".join(cell.split()).replace("|", r"\|")
    return texts


def read_count(table, name, below):
    """Return the table's number of header rows or columns. ValueError unless it is at least 0 and less than `below`."""
    count = table.get(name)
    if type(count) is not int or not 0 <= count < below:
        raise ValueError(f"the table's {name} must be a whole number from 0 to {below - 1}, not {count!r}")
    return count


def read_tree(table, name, line, texts):
    """Return {line: path} of a header tree, {} if there is none.

    In: `line`, "row_index" or "column_index", of the lines that the headers belong to. `texts`: the table's cells.
    Out: for each line that has nodes, the (row, column) of the nodes down to its deepest one.
    """
    root = table.get(name)
    paths, waiting = {}, [(root, [])] if root else []
    while waiting:
        node, path = waiting.pop()
        if not isinstance(node, dict):
            node = {}
        row, column, children = node.get("row_index"), node.get("column_index"), node.get("children") or []
        if type(row) is not int or type(column) is not int or not isinstance(children, list):
            raise ValueError(f"a node of the table's {name} must have row_index, column_index and children")
        if 0 <= row < len(texts) and 0 <= column < len(texts[0]):  # skip the root, and nodes outside the table
            path = [*path, (row, column)]
            if len(path) > len(paths.get(node[line], [])):
                paths[node[line]] = path
        waiting += [(child, path) for child in reversed(children)]
    return paths


def fill_regions(table, texts, n_top, n_left):
    """Return the texts with each merged region's text in all its cells; header regions stay within the headers."""
    filled = [list(row) for row in texts]
    regions = table.get("merged_regions") or []
    if not isinstance(regions, list):
        raise ValueError(f"the table's merged_regions must be a list, not {regions!r}")
    names = ("first_row", "last_row", "first_column", "last_column")
    for region in regions:
        place = [region.get(name) for name in names] if isinstance(region, dict) else [None]
        if not all(type(index) is int and index >= 0 for index in place):
            raise ValueError(f"a merged region of the table must have {', '.join(names)}, not {region!r}")
        first_row, last_row, first_column, last_column = place
        end_row, end_column = min(last_row + 1, len(texts)), min(last_column + 1, len(texts[0]))
        if first_row < n_top:
            end_row = min(end_row, n_top)
        if first_column < n_left:
            end_column = min(end_column, n_left)
        for row in range(first_row, end_row):
            for column in range(first_column, end_column):
                filled[row][column] = filled[row][column] or texts[first_row][first_column]
    return filled
