"""Read rows of data: from a file, the files of a folder, or a data set of the Hugging Face hub.

Every error is a ValueError that names the file and the row (counted from 1).
"""

import ast
import contextlib
import json
import re
from pathlib import Path

SUFFIXES = {".parquet", ".json", ".jsonl"}
OTHER_FILES = {".csv", ".tsv", ".txt"}  # neither data nor hub ids
SPLITS = ("train", "test")
MEDIA = re.compile(
    r"(?:\w+_)?(?:image|img|picture|photo|audio|video)s?(?:_?\d+|_(?:path|file|url|bytes))?s?|multi_?modal_data",
    re.IGNORECASE,
)


def check_split(split: str, size=None) -> None:
    if split not in SPLITS:
        raise ValueError(f"split must be train or test, not {split!r}")
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, not {size}")


def files_of(source, split: str):
    """Return the files that a path names: itself, or the folder's files for the split.

    None if it is a hub id, or a folder that `save_to_disk` of the library `datasets` has written.
    """
    path = Path(source).expanduser()
    if is_saved(path):
        return None  # hub_parts reads it
    if path.is_dir():
        return folder_files(path, split)
    if path.is_file():
        return [path]
    if is_written_as_path(str(source)):
        raise ValueError(f"{source} does not exist")
    return None


def is_saved(folder):
    """Return whether `save_to_disk` has written the folder: a data set, or a dictionary of them."""
    is_data_set = all((folder / name).is_file() for name in ("state.json", "dataset_info.json"))
    return is_data_set or (folder / "dataset_dict.json").is_file()


def is_written_as_path(name) -> bool:
    """Return whether the name can only be a path, not a hub id: it begins like a path, or ends like a file."""
    return name.startswith((".", "/", "~")) or Path(name).suffix in SUFFIXES | OTHER_FILES


def folder_files(folder, split: str):
    """Return the folder's data files for the split: those whose name says so, and those whose name has no split.

    If any file has "train" in its name, only such files are for training.
    """
    files = {}  # {file: splits in its name}
    for file in sorted(folder.iterdir()):
        if file.suffix in SUFFIXES:
            files[file] = re.findall(r"(?<![a-z])(?:train|test)(?![a-z])", file.stem.lower())
    found = [file for file, splits in files.items() if not splits or split in splits]
    if split == "train":
        found = [file for file in found if files[file]] or found
    if not found:
        raise ValueError(f"{folder} holds no .parquet, .json or .jsonl file for {split}")
    return found


def read_file(file):
    """Return the rows of a .parquet, .json or .jsonl file: a list of anything, because JSON may have null or a number.

    Errors: ValueError with the file's name, and for .jsonl the row's number, if it can't be read.
    It does not use the library `datasets`, in which a JSON file that begins with null ends the whole process.
    """
    if file.suffix not in SUFFIXES:
        raise ValueError(f"{file}: expected a .parquet file, a .json file with a list, or a .jsonl file")
    where = file
    try:
        if file.suffix == ".parquet":
            import pyarrow.parquet  # imported here: scoring doesn't need it

            return check_rows(pyarrow.parquet.read_table(file).to_pylist(), file)
        data = file.read_bytes()
        text = data.decode(json.detect_encoding(data)).replace("\ufeff", "")  # also Windows' encodings, without BOM
        if file.suffix == ".json" and not text.lstrip().startswith("{"):
            rows = json.loads(text)
        else:  # one row per line; some data sets name such a file .json, too
            rows = []
            is_one = file.suffix == ".json" and not re.search(r"\}\s*\n\s*\{", text)  # an object on several lines
            for line in [text] if is_one else filter(str.strip, text.split("\n")):
                where = f"{file}, row {len(rows) + 1}"
                rows.append(json.loads(line))
    except Exception as error:  # pyarrow's and json's errors share no class
        raise ValueError(f"{where} could not be read: {error}") from error
    if not isinstance(rows, list):
        raise ValueError(f"{file}: expected a list of rows, as one .json list or as the lines of a .jsonl file")
    if not rows:
        raise ValueError(f"{file} holds no rows")
    return check_rows(rows, file)


def check_rows(rows, where):
    """Return the rows. ValueError if one has a picture, a sound or a film, or if the only one holds whole columns."""
    for i, row in enumerate(rows, 1):
        media = [key for key in row if MEDIA.fullmatch(key) and row[key]] if isinstance(row, dict) else []
        if media:
            raise ValueError(f"{where}, row {i} has {media[0]}: models get text alone, so such rows can't be used")
    values = list(rows[0].values()) if len(rows) == 1 and isinstance(rows[0], dict) else [""]
    if values and all(isinstance(value, dict) or (isinstance(value, list) and not is_chat(value)) for value in values):
        raise ValueError(f"{where} holds the columns {', '.join(rows[0])}: expected a list of rows, one per problem")
    return rows


def is_chat(found, keys=("role", "from", "type")) -> bool:
    """Return whether this is a list of turns, or of a turn's parts."""
    return isinstance(found, list) and any({*keys} & {*turn} for turn in found if isinstance(turn, dict))


def chat_of(cell):
    """Return the chat that a cell holds as a string of JSON or Python; any other cell as it is. Else ValueError."""
    if not isinstance(cell, str) or not re.match(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]", cell):
        return cell
    for read in (json.loads, ast.literal_eval):
        with contextlib.suppress(ValueError, SyntaxError):
            return read(cell)
    raise ValueError(f"it looks like a chat in a string, and can't be read: {cell!r:.60}")


def hub_parts(name, *config):
    """Return the parts of a hub data set, or of a saved one, {name: datasets.Dataset}.

    config: the hub data set's configuration, if it has several; it may also stand behind the name: openai/gsm8k:main.
    Of a saved data set it is the only part to take, if it is there.
    """
    import datasets  # takes seconds, and scoring doesn't need it

    datasets.disable_progress_bars()
    folder = Path(name).expanduser()
    if is_saved(folder):
        try:
            saved = datasets.load_from_disk(str(folder))
        except Exception as error:  # many kinds, of damaged files
            raise ValueError(f"{name}, a folder of save_to_disk, could not be read: {error}") from error
        parts = saved if isinstance(saved, dict) else {folder.resolve().name: saved}
        return {part: parts[part] for part in parts if part in config} or parts
    name, _, given = name.partition(":")
    try:
        return datasets.load_dataset(name, *([given] if given else config), trust_remote_code=False)
    except Exception as error:  # for example no network, no such id, or no such configuration
        names = []
        if isinstance(error, ValueError):  # no configuration, or a wrong one
            with contextlib.suppress(Exception):
                names = ", ".join(datasets.get_dataset_config_names(name))
        if names:
            raise ValueError(f"{name} needs one of its configurations behind a colon, {name}:…: {names}") from error
        raise ValueError(
            f"could not load the data set {name!r} from the Hugging Face hub, and there is no file or folder {name} in "
            f"{Path.cwd()}: {error}\n"
            f"It should be at https://huggingface.co/datasets/{name}. Without a network, fetch its files elsewhere "
            "and give the path of a file or folder instead (--data, --test_data)."
        ) from error


def check_columns(rows, columns, where) -> None:
    """Raise ValueError if a row is not an object, or if no row has one of the columns. `where`: the file or hub id."""
    there = []
    for i, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{where}, row {i}: expected an object with {', '.join(columns)}, not {row!r}")
        there += [column for column in row if column not in there]
    missing = [column for column in columns if column not in there]
    if missing:
        of_math = "; --task math takes such a file" if {"problem", "answer"} <= {*there} else ""
        raise ValueError(f"{where} lacks the columns {', '.join(missing)}; it has {', '.join(there)}{of_math}")


def text_of(content) -> str:
    """Return the text of a turn's content: a text, or a list of parts, {"type": "text", "text": …}. Else ValueError."""
    parts = content if isinstance(content, list) else [content]
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = f"a part of type {part['type']}" if isinstance(part, dict) and "type" in part else f"{part!r:.60}"
            raise ValueError(f"a turn's content must be a text or a list of parts with text, not {kind}")
        texts.append(text)
    return "".join(texts)


def with_content(turn):
    """Return the turn, with an empty content if it only calls tools."""
    calls_only = isinstance(turn, dict) and turn.get("tool_calls") and turn.get("content") is None
    return {**turn, "content": ""} if calls_only else turn


def check_text(text: str, where) -> None:
    """Raise ValueError unless the text can be written as UTF-8. JSON may have half of a surrogate pair: \\ud800."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: a text holds {text[error.start]!r}, which is no character") from error
