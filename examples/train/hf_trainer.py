"""Fine-tuning with the Trainer of Hugging Face that survives: one import differs.

meshmend run --elastic --mesh 2x2 --preload transformers --inject "kill 0,1 at 10" \
    examples/train/hf_trainer.py
"""

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

from meshmend.train.hf import Trainer  # instead of: from transformers import Trainer


class Sentences(torch.utils.data.Dataset):
    """Made-up sentences of 8 to 16 words, in which each word follows from the one before it."""

    def __init__(self, n_sentences: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.words = torch.randint(0, 64, (n_sentences, 16), generator=generator)
        for at in range(1, 16):
            self.words[:, at] = (5 * self.words[:, at - 1] + 1) % 64
        self.lengths = torch.randint(8, 17, (n_sentences,), generator=generator)

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        words, is_word = self.words[index], torch.arange(16) < self.lengths[index]
        labels = torch.where(is_word, words, -100)
        return {"input_ids": words, "attention_mask": is_word.long(), "labels": labels}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--output", default="runs/hf_trainer")
    options = parser.parse_args()

    torch.manual_seed(0)
    shape = {"n_positions": 16, "n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 64}
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model = GPT2LMHeadModel(GPT2Config(**shape, **ends, **dropout))
    sentences = Sentences(512)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=options.output,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            warmup_steps=5,
            max_grad_norm=1.0,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=20,
            save_steps=20,
            report_to=[],
            use_cpu=True,
        ),
        train_dataset=sentences,
        eval_dataset=torch.utils.data.Subset(sentences, range(64)),
    )
    trainer.train()


if __name__ == "__main__":
    main()
