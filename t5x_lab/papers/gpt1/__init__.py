"""GPT-1 (Radford et al. 2018): `classification` tasks, zero-shot `probes`, text cleaning (`standardize`)."""
