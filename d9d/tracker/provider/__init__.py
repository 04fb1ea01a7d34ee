"""One module per tracker. Packages behind them are imported when a tracker is built."""
