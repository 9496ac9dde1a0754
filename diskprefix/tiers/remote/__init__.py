"""The tier that machines share: immutable objects in an object store. The page of `tiers` gives the format."""
