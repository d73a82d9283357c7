"""List the papers' settings per task. Settings that are not named keep the script's defaults.

Knights & Knaves is missing: its settings are the scripts' defaults. A script may change some of
these settings, or add settings of its own: see TASKS in the script.
"""

TASKS = {
    "math": {  # AR-Lopti (arXiv 2505.12929), Section 5.2: a base model, not trained to chat
        "model": "Qwen/Qwen2.5-7B",
        "chat_template": "none",
        "epochs": 1,  # of Open-Reasoner-Zero's 57k problems; DSR-uniform's 10k: --epochs 5
        "prompts_per_step": 128,
        "temperature": 1.0,
    },
    "countdown": {  # ACPO (arXiv 2606.22570), Section 4.2, and the release's scripts
        "prompts_per_step": 128,
        "responses_per_prompt": 10,
        "max_response_tokens": 3072,
        "temperature": 1.0,
    },
    "hitab": {  # ACPO, Table 1b: a base model
        "model": "Qwen/Qwen2.5-3B",
        "chat_template": "none",
        "prompts_per_step": 128,
        "responses_per_prompt": 10,
        "max_response_tokens": 3072,
        "temperature": 1.0,
    },
}
