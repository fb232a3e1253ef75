"""A script for Hugging Face's `Trainer`: a small Llama on the bytes of a text. No Poplar yet.

docs/guides/transformers.md shows the lines to change; the tests change them and run the result.

    torchrun --nproc-per-node 2 examples/plain_trainer.py --output_dir run --max_steps 20
"""

import json
import sysconfig
from pathlib import Path

from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

CONTEXT = 128


def windows(path):
    """Each window of a file, as bytes, is a sample."""
    text = list(path.read_bytes())
    rows = [text[at : at + CONTEXT] for at in range(0, len(text) - CONTEXT, CONTEXT)]
    return [{"input_ids": row, "labels": row} for row in rows]


def main():
    (args,) = HfArgumentParser(TrainingArguments).parse_args_into_dataclasses()
    dataset = windows(Path(sysconfig.get_path("stdlib"), "argparse.py"))
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
    model = LlamaForCausalLM(config)
    trainer = Trainer(model, args, train_dataset=dataset[8:], eval_dataset=dataset[:8])
    trainer.train()
    trainer.save_model()
    metrics = trainer.evaluate()
    if trainer.is_world_process_zero():
        print(json.dumps(metrics))


if __name__ == "__main__":
    main()
