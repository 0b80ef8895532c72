"""Definitions that belong to papers: data sets, collections, templates, task names, probes, lm-eval tasks.

data_sets.py   labelled data sets that the papers use
t0.py          T0's training and evaluation collections (Sanh et al. 2022)
flan/          FLAN's clusters, collections and templates (Wei et al. 2022)
t5/            the T5 text-to-text suite and its metrics (Raffel et al. 2020)
gpt1/          GPT-1's classification tasks, probes and text cleaning (Radford et al. 2018)
eai_eval/      EAI-Eval as lm-eval tasks (Wang et al. 2022)

Importing a module registers its definitions with the engine in `t5x_lab.prompts`, which knows no paper.
"""
