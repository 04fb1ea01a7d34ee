"""What a Trainer has that the strategy must look at, exchange or refuse."""
