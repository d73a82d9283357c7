"""What the kept results say about the papers' claims."""


def of_file(name, folder):
    """The verdicts that read FOLDER/NAME.json, a line each."""
    return []
