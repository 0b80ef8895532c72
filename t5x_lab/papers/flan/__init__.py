"""FLAN (Wei et al. 2022): `clusters` of data sets, `collections` and the `templates` folder."""
