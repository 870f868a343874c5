"""Score a model bigger than the GPU with lm-evaluation-harness: python examples/score_with_lm_eval.py [MODEL] [TASK] [LIMIT]

Without a task it asks three questions of its own; a task such as arc_easy is fetched by lm-eval, which needs a network.
"""

import sys

import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from zero_inference import load

QUESTIONS = {
    "The capital of France is": [" Paris", " London", " Madrid"],
    "Water freezes at a temperature of": [" 0 degrees", " 50 degrees", " 90 degrees"],
    "The opposite of hot is": [" cold", " blue", " fast"],
}

model_name = sys.argv[1] if len(sys.argv) > 1 else "smollm2-135m"
task = sys.argv[2] if len(sys.argv) > 2 else None

# Memory is planned for 4 sequences of 512 tokens at once, logits included; lm-eval may ask for as much and no more.
with load(model_name, batch_size=4, max_length=512) as model:
    lm = HFLM(pretrained=model, tokenizer=model.tokenizer, batch_size=4, max_length=512)
    if task:
        limit = int(sys.argv[3]) if len(sys.argv) > 3 else None
        print(lm_eval.simple_evaluate(lm, tasks=[task], limit=limit)["results"])
    else:
        pairs = [(question, answer) for question, answers in QUESTIONS.items() for answer in answers]
        requests = [Instance("loglikelihood", {}, pair, number) for number, pair in enumerate(pairs)]
        scores = dict(zip(pairs, lm.loglikelihood(requests)))
        for question, answers in QUESTIONS.items():
            best = max(answers, key=lambda answer: scores[question, answer][0])
            print(f"{question}{best} (log-likelihood {scores[question, best][0]:.2f})")
