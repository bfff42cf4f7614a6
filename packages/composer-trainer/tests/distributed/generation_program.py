"""One of two processes that train a small GPT-2 with and without FSDP2, generate, evaluate and save; writes results."""

import json
import sys
from pathlib import Path

import peft
import tokenizers
import torch
import transformers
from torch.utils.data import DataLoader

from composer import Trainer, distributed
from composer.algorithms import EMA
from composer.callbacks import Generate, SavePretrained
from composer.loggers import InMemoryLogger
from composer.metrics import LanguageCrossEntropy
from composer.models import HuggingFaceModel

VOCABULARY = 20
PROMPTS = ["3 4 5", "6 7"]


def make_model(**settings):
    """Return a GPT-2 whose logits differ much, so that greedy decoding depends on the weights."""
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({str(token): token for token in range(VOCABULARY)}, "0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    torch.manual_seed(0)
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 1}
    sizes = {"vocab_size": VOCABULARY, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    network = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **ends, initializer_range=0.5))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="1", pad_token="1")
    return HuggingFaceModel(network, tokenizer, use_logits=True, metrics=[LanguageCrossEntropy()], **settings)


def train(parallelism_config, folder, **settings):
    """Return what a run generates, its metric, and what its model generates afterwards."""
    model, tokens = make_model(**settings), torch.Generator().manual_seed(1)
    rows = [torch.randint(2, VOCABULARY, (6,), generator=tokens) for _ in range(8)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    options = {"max_new_tokens": 16, "do_sample": True, "temperature": 3.0}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=2, sampler=distributed.get_sampler(data)),
        eval_dataloader=DataLoader(data, batch_size=2, sampler=distributed.get_sampler(data)),
        optimizers=torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.01),
        max_duration="2ba",
        algorithms=EMA("1ba"),
        callbacks=[Generate(PROMPTS, "1ba", **options), SavePretrained(folder / "pretrained")],
        save_folder=str(folder / "checkpoints"),
        loggers=InMemoryLogger(),
        parallelism_config=parallelism_config,
        device="cpu",
        progress_bar=False,
        seed=3,
    )
    trainer.fit()
    greedy = model.generate(torch.tensor([[3, 4, 5]]), attention_mask=torch.ones(1, 3, dtype=int), max_new_tokens=8)
    [logger] = trainer.logger.destinations
    trainer.close()
    return {
        "sampled": [words for _, words in logger.tables["generations"]["rows"]],
        "cross entropy": float(logger.data["metrics/eval/LanguageCrossEntropy"][-1][1]),
        "greedy": greedy.tolist(),
    }


def main(folder):
    folder, sharded = Path(folder), {"fsdp": {}}
    if distributed.get_global_rank() == 0:
        make_model().model.save_pretrained(folder / "base")
    results = {"replicated": train(None, folder / "replicated"), "sharded": train(sharded, folder / "sharded")}
    lora = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    results["adapters"] = train(sharded, folder / "adapters", peft_config=lora) | {"folder": str(folder)}
    (folder / f"{distributed.get_global_rank()}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main(sys.argv[1])
