"""Ask the Hugging Face hub, print that it is asked, and don't wait long for an answer.

The hub's own library retries for half a minute before it reports that there is no network.
"""

import os

from huggingface_hub import constants
from huggingface_hub.utils import get_session

from rewards import rows
from runtime import checks
from runtime.ranks import RANK

PATIENCE = 10  # seconds that the hub has to answer


def ask(*names):
    """Ask the hub if some of these models and data are hub ids, and print that it is asked.

    If it does not answer, only earlier downloads are used from now on. Nothing happens if
    HF_HUB_OFFLINE is set. Loading finds out whether the files are there.
    """
    names = [name for name in names if is_hub_id(name)]
    if not names or constants.is_offline_mode():
        return
    if RANK == 0:
        print(f"asking {constants.ENDPOINT} for {', '.join(names)}", flush=True)
    try:
        get_session().head(constants.ENDPOINT, timeout=PATIENCE)
    except Exception as error:  # its library raises many kinds
        # Tell this process, libraries that are imported later, and processes that it starts.
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"
        if RANK == 0:
            print(f"it can't be reached ({error}): only what was downloaded before is used")


def is_hub_id(name):
    """Return whether this model or data set would come from the hub, and not from a path."""
    return bool(name) and not rows.is_written_as_path(name) and not checks.is_path(name)
