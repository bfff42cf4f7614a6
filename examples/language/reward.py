"""A reward model: score descriptions above lines of code."""

import torch
from stand_ins import load_config, load_pairs, load_tokenizer
from torch.utils.data import DataLoader
from transformers import LlamaForSequenceClassification

from composer import Trainer
from composer import functional as cf
from composer.models import PreferenceModel


def main(folder: str = "runs/reward", duration: str = "3ep") -> dict:
    """Train, continuing a training that was stopped; return the model, the held-back pairs and their metrics."""
    tokenizer = load_tokenizer()

    def tokenize(pair: dict, side: str) -> dict:
        return cf.tokenize_chat(pair["prompt"] + pair[side], tokenizer, answers="last")

    pairs = [{side: tokenize(pair, side) for side in ("chosen", "rejected")} for pair in load_pairs()]
    torch.manual_seed(0)
    model = PreferenceModel(LlamaForSequenceClassification(load_config(tokenizer, num_labels=1)), tokenizer)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(pairs[::2], batch_size=8, shuffle=True, collate_fn=cf.collate_pairs),
        eval_dataloader=DataLoader(pairs[1::2], batch_size=8, collate_fn=cf.collate_pairs),
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-3),
        max_duration=duration,
        save_folder=folder,
        run_name="reward",
        autoresume=True,
        seed=0,
    )
    trainer.fit()
    return {"model": model, "pairs": pairs[1::2], "metrics": trainer.eval()["eval"]}


if __name__ == "__main__":
    print(main()["metrics"])
