"""The data of a batch: loaders and what is known of them, the items of batches, packed sequences."""
