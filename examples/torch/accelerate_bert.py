"""Hugging Face Accelerate trains a small BERT on a mesh with a hole.

Accelerate takes a process group that is there already, so the backend is named before it starts.

meshmend run --mesh 4x4 --fail 2x2@0,2 --preload transformers examples/torch/accelerate_bert.py
"""

import argparse
import pydoc_data.topics

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForMaskedLM

MASK, LENGTH = 256, 32


def sentences(n_sentences: int) -> TensorDataset:
    """Return pieces of Python's own help texts as bytes, some masked, and what was there."""
    text = "".join(pydoc_data.topics.topics.values()).encode()[: n_sentences * LENGTH]
    labels = torch.tensor(list(text)).view(n_sentences, LENGTH)
    hidden = torch.rand(labels.shape, generator=torch.Generator().manual_seed(0)) < 0.15
    return TensorDataset(labels.masked_fill(hidden, MASK), labels.masked_fill(~hidden, -100))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="meshmend")
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()

    dist.init_process_group(options.backend)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=257,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    data = DataLoader(sentences(4 * accelerator.num_processes * options.steps), batch_size=4)
    model, optimizer, data = accelerator.prepare(model, optimizer, data)
    for step, (tokens, labels) in enumerate(data):
        loss = model(input_ids=tokens, labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        mean = accelerator.gather(loss.detach()).mean().item()
        accelerator.print(f"step {step} loss {mean:.6f}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
