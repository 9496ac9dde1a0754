"""The bucket that machines share: a tier behind the tiers of one machine."""
