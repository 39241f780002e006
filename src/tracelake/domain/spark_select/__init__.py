"""One SELECT over known relations, in a part of Spark's language: read, judged and written anew."""
