"""Chats: train on the assistant's answers alone, several chats in a row, and let the model answer."""

import torch
from stand_ins import load_config, load_pairs, load_tokenizer
from torch.utils.data import DataLoader
from transformers import LlamaForCausalLM

from composer import Trainer
from composer import functional as cf
from composer.core import pack_sequences
from composer.models import HuggingFaceModel


def main(folder: str = "runs/chat", duration: str = "10ep") -> dict:
    """Train, continuing a training that was stopped; return the model and the answer to the first question."""
    chats = [{"messages": pair["prompt"] + pair["chosen"]} for pair in load_pairs()]
    tokenizer = load_tokenizer()
    rows = pack_sequences([cf.tokenize_chat(chat, tokenizer) for chat in chats], length=64, too_long="truncate")
    torch.manual_seed(0)
    model = HuggingFaceModel(LlamaForCausalLM(load_config(tokenizer)), tokenizer)
    Trainer(
        model=model,
        train_dataloader=DataLoader(rows, batch_size=4, shuffle=True, collate_fn=cf.collate_packed),
        optimizers=torch.optim.AdamW(model.parameters(), lr=5e-3),
        max_duration=duration,
        save_folder=folder,
        run_name="chat",
        autoresume=True,
        seed=0,
    ).fit()
    question = tokenizer.apply_chat_template(chats[0]["messages"][:1], add_generation_prompt=True, return_tensors="pt")
    tokens = model.generate(**question, max_new_tokens=40)[0, question["input_ids"].shape[1] :]
    return {"model": model, "answer": tokenizer.decode(tokens), "expected": chats[0]["messages"][1]["content"]}


if __name__ == "__main__":
    print(main()["answer"])
