"""Ask the Hugging Face hub, print that it is asked, and don't wait long for an answer.

The hub's own library retries for half a minute before it reports that there is no network.
"""

import os
import threading

from huggingface_hub import constants, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import get_session, validate_repo_id

from rewards import rows
from runtime import checks
from runtime.ranks import RANK

PATIENCE = 10  # seconds that the hub has to answer


def ask(model, *data):
    """Ask the hub if the model or some of the data are hub ids, and print that it is asked.

    If it does not answer, only earlier downloads are used from now on. ValueError if the model was
    never downloaded. Nothing happens if HF_HUB_OFFLINE is set. Loading finds out whether the data
    are there.
    """
    names = [name for name in (model, *data) if is_hub_id(name)]
    if not names or constants.is_offline_mode():
        return
    if RANK == 0:
        print(f"asking {constants.ENDPOINT} for {', '.join(names)}", flush=True)
    problem = why_unreachable()
    if not problem:
        return
    # Tell this process, libraries that are imported later, and processes that it starts.
    constants.HF_HUB_OFFLINE = True
    os.environ["HF_HUB_OFFLINE"] = "1"
    if model in names and not isinstance(try_to_load_from_cache(model, "config.json"), str):
        raise ValueError(
            f"{checks.no_folder(model)}{model} is not on this machine, and {constants.ENDPOINT} "
            f"can't be reached ({problem}). Where there is a network, `hf download {model} "
            "--local-dir FOLDER` gets it; copy that folder here and name it in place of the hub id"
        )
    if RANK == 0:
        print(f"it can't be reached ({problem}): only what was downloaded before is used")


def why_unreachable():
    """Say why the hub does not answer within PATIENCE; "" if it does, whatever the answer."""
    outcome = []

    def head():
        try:
            get_session().head(constants.ENDPOINT, timeout=PATIENCE)
            outcome.append("")
        except Exception as error:  # its library raises many kinds
            outcome.append(str(error) or type(error).__name__)

    # Use a thread: looking up an address can take longer than any timeout.
    asking = threading.Thread(target=head, daemon=True)
    asking.start()
    asking.join(PATIENCE)
    return outcome[0] if outcome else f"no answer within {PATIENCE} seconds"


def is_hub_id(name):
    """Return whether this model or data set would come from the hub, and not from a path."""
    if not name or rows.is_written_as_path(name) or checks.is_path(name):
        return False
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True
