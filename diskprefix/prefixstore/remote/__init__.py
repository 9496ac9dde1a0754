"""The bucket that machines share: a tier below the tiers of one machine."""
