"""Pairs of questions that readers ask in a library, and whether they ask for the same.

Half of the pairs mean the same in other words. The others have most of their words in common and mean something else, which
a general model takes for similar.
"""

from collections.abc import Callable
from pathlib import Path

import lightning as L
import torch
from tokenizers import Tokenizer
from torch.utils.data import DataLoader, Dataset

# Two questions, and how similar they are.
PAIRS = [
    ("How do I renew a book?", "Can I keep a book for longer?", 1.0),
    ("How do I renew a book?", "How do I return a book?", 0.0),
    ("When do you open on Sunday?", "What are the opening hours on Sunday?", 1.0),
    ("When do you open on Sunday?", "Why are you closed on Sunday?", 0.0),
    ("I have lost my card.", "My library card is gone.", 1.0),
    ("I have lost my card.", "I have found my card.", 0.0),
    ("Where is the reading room?", "How do I get to the reading room?", 1.0),
    ("Where is the reading room?", "Who may book the reading room?", 0.0),
    ("Can I print here?", "Is there a printer I can use?", 1.0),
    ("Can I print here?", "Can I eat here?", 0.0),
    ("How much is the fine for a late book?", "What does it cost to bring a book back too late?", 1.0),
    ("How much is the fine for a late book?", "Where do I pay the fine for a late book?", 0.0),
    ("May children borrow films?", "Are kids allowed to take out movies?", 1.0),
    ("May children borrow films?", "Which films are for children?", 0.0),
    ("The book I want is on loan.", "Somebody else has borrowed the book I need.", 1.0),
    ("The book I want is on loan.", "The book I want is damaged.", 0.0),
    ("How do I reserve a title?", "Can you put a title aside for me?", 1.0),
    ("How do I reserve a title?", "How do I cancel a reserved title?", 0.0),
    ("Is there a group for people who learn German?", "Can I meet others who study German?", 1.0),
    ("Is there a group for people who learn German?", "Is there a dictionary for people who learn German?", 0.0),
    ("My account is locked.", "I cannot get into my account any more.", 1.0),
    ("My account is locked.", "My account is empty.", 0.0),
    ("Do you lend musical instruments?", "Can I take a guitar home from you?", 1.0),
    ("Do you lend musical instruments?", "Do you repair musical instruments?", 0.0),
    ("Where can I leave my bag?", "Is there a locker for my bag?", 1.0),
    ("Where can I leave my bag?", "Where can I buy a bag?", 0.0),
    ("I would like to give you my old books.", "Do you take donations of used books?", 1.0),
    ("I would like to give you my old books.", "I would like to buy your old books.", 0.0),
    ("How do I become a member?", "What must I do to join the library?", 1.0),
    ("How do I become a member?", "How do I end my membership?", 0.0),
    ("Can I read newspapers at home?", "Do you have newspapers online?", 1.0),
    ("Can I read newspapers at home?", "Can I keep the old newspapers?", 0.0),
    # To validate:
    ("How many books may I take?", "What is the largest number of loans?", 1.0),
    ("How many books may I take?", "How many books do you have?", 0.0),
    ("The scanner does not work.", "I think the scanner is broken.", 1.0),
    ("The scanner does not work.", "The scanner is in use.", 0.0),
    ("Is the café open today?", "Can I get a coffee here today?", 1.0),
    ("Is the café open today?", "Was the café open yesterday?", 0.0),
    ("Please change my address.", "I have moved to another street.", 1.0),
    ("Please change my address.", "Please delete my address.", 0.0),
]
NUM_TRAIN = 32


class Rows(Dataset):
    """Rows of tensors that are equally long, as dicts."""

    def __init__(self, **columns: torch.Tensor):
        self.columns = columns

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {name: values[index] for name, values in self.columns.items()}


class PairData(L.LightningDataModule):
    """32 pairs to train with, 8 to validate; all of them to test."""

    def __init__(self, directory: Path, batch_size: int = 4):
        super().__init__()
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.enable_padding()
        tokenizer.no_truncation()
        encoded = tokenizer.encode_batch([sentence for *pair, _ in PAIRS for sentence in pair])
        self.batch_size = batch_size
        self.tokens = torch.tensor([each.ids for each in encoded]).unflatten(0, (-1, 2))  # (N, 2, T)
        self.mask = torch.tensor([each.attention_mask for each in encoded]).bool().unflatten(0, (-1, 2))  # (N, 2, T)
        self.similarity = torch.tensor([similarity for *_, similarity in PAIRS])  # (N,)
        self.embed: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
        """Embeds pairs of sentences as a test is to find them, (N, 2, T) -> (N, 2, D). Called on rank 0."""
        self.expected: torch.Tensor | None = None

    def setup(self, stage):
        if stage == "test":
            own = self.embed(self.tokens, self.mask) if self.trainer.is_global_zero else None
            self.expected = self.trainer.strategy.broadcast(own)

    def rows(self, part: slice) -> Rows:
        return Rows(tokens=self.tokens[part], mask=self.mask[part], similarity=self.similarity[part])

    def train_dataloader(self):
        return DataLoader(self.rows(slice(NUM_TRAIN)), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.rows(slice(NUM_TRAIN, None)), batch_size=self.batch_size)

    def test_dataloader(self):
        return DataLoader(Rows(tokens=self.tokens, mask=self.mask, expected=self.expected), batch_size=10)
