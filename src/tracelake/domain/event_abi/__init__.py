"""Event ABIs as a DAG author writes them: parsed and checked without a chain, so that a deploy can refuse them."""
