"""Train a Hugging Face model on any number of processes and machines.

python examples/hugging_face.py
polyrhythm train examples/hugging_face.py --local 2                   # two replicas
polyrhythm train examples/hugging_face.py --stages 2 --pipelines 2    # two, each in two stages
"""

from text import config, data, tokenizer
from transformers import AutoModelForCausalLM, DataCollatorForLanguageModeling

import polyrhythm as pr

model = AutoModelForCausalLM.from_config(config)  # or from_pretrained(name)
collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)
adamw, cosine = pr.adamw(lr=3e-3, weight_decay=0.1), pr.cosine(warmup=10)
trainer = pr.Trainer(
    model, dataset=data, collate_fn=collate, optimizer_fn=adamw, lr_schedule=cosine, batch_size=32
)
trainer.fit(max_steps=100)
