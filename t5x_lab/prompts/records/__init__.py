"""Records of data sets.

locations.py     where the records of a data set are
sources.py       SeqIO data sources of records
subsets.py       the first records of a source
json_records.py  records as lines of JSON
"""
