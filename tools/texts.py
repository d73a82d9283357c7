"""Write texts that a tool makes: tables, whole files, or the text between two marks. git shows the changes."""

from runtime import files


def table(titles, rows):
    """Return a Markdown table of texts."""
    lines = [f"| {' | '.join(titles)} |", "|---" * len(titles) + "|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def between(text, name, new):
    """Return a page's text with `new` between its marks, <!-- NAME: begin --> and <!-- NAME: end -->, in blank lines.

    ValueError unless each mark occurs once, and in this order.
    """
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    if [text.count(begin), text.count(end)] != [1, 1] or text.index(begin) > text.index(end):
        raise ValueError(f"the file must have the marks {begin} and {end}, each once and in this order")
    return f"{text.partition(begin)[0]}{begin}\n\n{new.strip()}\n\n{end}{text.partition(end)[2]}"


def write(texts):
    """Write each text to its file, unless the file has it already, and print that. texts: {path: text}."""
    for path, text in texts.items():
        if path.exists() and path.read_text(encoding="utf-8") == text:
            print(f"left {path}")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            files.write(path, text)
            print(f"wrote {path}")
