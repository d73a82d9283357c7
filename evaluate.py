"""Evaluation: the papers' tables from any checkpoint.

vLLM samples a model's responses to the problems of a suite, and the suite's reward function
(rewards/) scores them. The result is one row of a table:

    kk         accuracy by number of people and their mean, greedy      AR-Lopti, Tables 7, 8, 9
    math       Olympiad Bench, Minerva, MATH-500 greedy; AMC avg@16;
               AIME24 pass@16 and avg@16; their mean                    AR-Lopti, Tables 1, 10
               --protocol acpo: AMC, Minerva, MATH-500,
               Olympiad Bench, all avg@8 at T = 1                       ACPO, Table 2
    countdown  accuracy, avg@4 at T = 1                                 ACPO, Table 1a
    hitab      accuracy by kind of question and over all,
               avg@4 at T = 1                                           ACPO, Table 1b
    gym        accuracy by generator of reasoning-gym (--gym)
               and over all, avg@4 at T = 1                             no paper

--pass_at_k adds pass@1, pass@2, pass@4 … up to --samples, over all problems. evaluation/figures.py
defines avg@n, pass@k and the standard error next to each figure.

Deviations from the papers, and choices that they leave open:
- The papers don't state the temperature of avg@16 and avg@4. Here it is 1, as in their training.
- ACPO's figures for HiTab are multiples of 1/1200, which suggests that it tests on 300 of the 1,584
  test questions. The paper says neither which ones, nor how it shows a table or compares answers.
  Here all questions count, scored by this project's own reward function.
- Problems whose answer math-verify can't read are dropped (4 of Minerva's 272, 3 of Olympiad
  Bench's 675). The papers divide by all problems.

Command (--data_dir FOLDER evaluates on the papers' puzzles instead of generated ones):
    python evaluate.py Qwen/Qwen2.5-3B-Instruct runs/grpo_kk_0_… --suite kk --last 3 --paper
"""

import sys

from evaluation.settings import read_settings
from runtime import flags

# The imports below load torch, which takes seconds. A bad flag or --help ends here.
if __name__ == "__main__":
    with flags.errors_in_one_line():
        read_settings(sys.argv[1:])

from evaluation.run import main

if __name__ == "__main__":
    main()
