"""Model states of a LightningModule: loaded before it trains, exported when it has."""
