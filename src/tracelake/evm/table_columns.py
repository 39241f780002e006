"""Which columns each table of a chain has, in their order."""

from __future__ import annotations

from tracelake.evm.columns import Column, Kind

_INTEGER, _WEI, _UINT256, _BYTES = Kind.INTEGER, Kind.WEI, Kind.UINT256, Kind.BYTES

EVERY_TABLE = (
    Column("chain_id", _INTEGER, "which chain"),
    Column("block_number", _INTEGER, "which block"),
    Column("block_hash", _BYTES, "the block's hash, 32 bytes"),
    Column("timestamp", Kind.INSTANT, "when the block was made, UTC"),
)

BLOCKS = (
    Column("parent_hash", _BYTES, "hash of the block before"),
    Column("author", _BYTES, "who gets the fees"),
    Column("gas_limit", _INTEGER, "gas that the block may use"),
    Column("gas_used", _INTEGER, "gas that it used"),
    Column("base_fee_per_gas", _WEI, "wei burnt per gas; since London", nullable=True),
    Column("blob_gas_used", _INTEGER, "gas of its blobs; since Cancun", nullable=True),
    Column(
        "excess_blob_gas", _INTEGER, "what the price of blob gas follows from; since Cancun", nullable=True
    ),
    Column("extra_data", _BYTES, "free text of the author"),
    Column("transaction_count", _INTEGER, "how many transactions it has"),
    Column("withdrawal_count", _INTEGER, "how many withdrawals; since Shanghai", nullable=True),
    Column("size", _INTEGER, "bytes of the whole block", nullable=True, proven=False),
    Column("difficulty", _UINT256, "proof of work; 0 since the Merge"),
    Column(
        "total_difficulty",
        _UINT256,
        "the chain's up to here; nodes stop giving it",
        nullable=True,
        proven=False,
    ),
    Column("logs_bloom", _BYTES, "filter of all logs, 256 bytes"),
    Column("state_root", _BYTES, "root of the state"),
    Column("transactions_root", _BYTES, "root of the transactions"),
    Column("receipts_root", _BYTES, "root of the receipts"),
    Column("withdrawals_root", _BYTES, "root of the withdrawals; since Shanghai", nullable=True),
    Column("uncles_hash", _BYTES, "hash of the list of uncles"),
    Column("uncles", Kind.BYTES_LIST, "the uncles' hashes"),
    Column("mix_hash", _BYTES, "proof of work; since the Merge the beacon chain's randomness", nullable=True),
    Column("nonce", _BYTES, "proof of work, 8 bytes", nullable=True),
    Column("parent_beacon_block_root", _BYTES, "the beacon block's parent; since Cancun", nullable=True),
    Column("requests_hash", _BYTES, "requests to the beacon chain; since Prague", nullable=True),
)

TRANSACTIONS = (
    Column("transaction_index", _INTEGER, "place in the block"),
    Column("transaction_hash", _BYTES, "the transaction's hash"),
    Column("transaction_type", _INTEGER, "0 legacy, 1 EIP-2930, 2 EIP-1559, 3 EIP-4844, 4 EIP-7702"),
    Column("nonce", _INTEGER, "the sender's counter"),
    Column("from_address", _BYTES, "sender", proven=False),
    Column("to_address", _BYTES, "recipient; null when a contract is made", nullable=True),
    Column("value", _UINT256, "wei sent"),
    Column("input", _BYTES, "call data, or the code that makes the contract"),
    Column("n_input_bytes", _INTEGER, "length of input"),
    Column("n_input_zero_bytes", _INTEGER, "of these zeros"),
    Column("n_input_nonzero_bytes", _INTEGER, "of these others"),
    Column("gas_limit", _INTEGER, "gas that it may use"),
    Column("gas_used", _INTEGER, "gas that it used; needs the receipt", nullable=True),
    Column("cumulative_gas_used", _INTEGER, "with all before it in the block", nullable=True),
    Column("gas_price", _WEI, "wei per gas, as the node gives it with the transaction", nullable=True),
    Column("effective_gas_price", _WEI, "wei per gas that was paid; needs the receipt", nullable=True),
    Column("max_priority_fee_per_gas", _WEI, "most for the author; since type 2", nullable=True),
    Column("max_fee_per_gas", _WEI, "most in all; since type 2", nullable=True),
    Column("max_fee_per_blob_gas", _WEI, "most per gas of a blob; type 3", nullable=True),
    Column("blob_gas_used", _INTEGER, "gas of its blobs; type 3", nullable=True),
    Column("blob_gas_price", _WEI, "wei per gas of a blob", nullable=True, proven=False),
    Column("blob_versioned_hashes", Kind.BYTES_LIST, "its blobs; type 3", nullable=True),
    Column("access_list", Kind.ACCESS_LIST, "addresses and slots announced; since type 1", nullable=True),
    Column("authorization_list", Kind.AUTHORIZATIONS, "accounts that take code; type 4", nullable=True),
    Column("success", Kind.BOOLEAN, "whether it succeeded; null before Byzantium", nullable=True),
    Column("contract_address", _BYTES, "the contract that it made", nullable=True),
    Column("v", _INTEGER, "signature, with the chain in it for type 0", nullable=True),
    Column("r", _BYTES, "signature, 32 bytes", nullable=True),
    Column("s", _BYTES, "signature, 32 bytes", nullable=True),
    Column("y_parity", _INTEGER, "signature, 0 or 1", nullable=True),
)

LOGS = (
    Column("transaction_index", _INTEGER, "place of its transaction in the block"),
    Column("log_index", _INTEGER, "place in the block"),
    Column("transaction_hash", _BYTES, "its transaction"),
    Column("address", _BYTES, "the contract that wrote it"),
    Column("topic0", _BYTES, "mostly the hash of the event's signature", nullable=True),
    Column("topic1", _BYTES, "first indexed argument", nullable=True),
    Column("topic2", _BYTES, "second indexed argument", nullable=True),
    Column("topic3", _BYTES, "third indexed argument", nullable=True),
    Column("data", _BYTES, "the arguments that aren't indexed"),
)

RECEIPTS = (
    Column("transaction_index", _INTEGER, "place of its transaction in the block"),
    Column("transaction_hash", _BYTES, "its transaction"),
    Column("transaction_type", _INTEGER, "as in transactions"),
    Column("from_address", _BYTES, "sender", proven=False),
    Column("to_address", _BYTES, "recipient", nullable=True),
    Column("contract_address", _BYTES, "the contract that it made", nullable=True),
    Column("success", Kind.BOOLEAN, "whether it succeeded; null before Byzantium", nullable=True),
    Column("root", _BYTES, "the state's root after it; until Byzantium", nullable=True),
    Column("gas_used", _INTEGER, "gas that it used"),
    Column("cumulative_gas_used", _INTEGER, "with all before it in the block"),
    Column("effective_gas_price", _WEI, "wei per gas that was paid", nullable=True),
    Column("blob_gas_used", _INTEGER, "gas of its blobs; type 3", nullable=True),
    Column("blob_gas_price", _WEI, "wei per gas of a blob", nullable=True, proven=False),
    Column("logs_bloom", _BYTES, "filter of its logs, 256 bytes"),
    Column("log_count", _INTEGER, "how many logs it has"),
)

WITHDRAWALS = (
    Column("withdrawal_index", _INTEGER, "the chain's counter of withdrawals"),
    Column("validator_index", _INTEGER, "which validator"),
    Column("address", _BYTES, "who gets it"),
    Column("amount", _INTEGER, "in gwei"),
)

TRACES = (
    Column("trace_index", _INTEGER, "place in the block", proven=False),
    Column(
        "transaction_index",
        _INTEGER,
        "place of its transaction; null for a reward",
        nullable=True,
        proven=False,
    ),
    Column("transaction_hash", _BYTES, "its transaction; null for a reward", nullable=True, proven=False),
    Column(
        "trace_address",
        Kind.TEXT,
        "place in the tree of calls: 0_2 is the third call of the first",
        proven=False,
    ),
    Column("subtraces", _INTEGER, "how many calls it made itself", proven=False),
    Column("action_type", Kind.TEXT, "call, create, suicide or reward", proven=False),
    Column(
        "action_call_type",
        Kind.TEXT,
        "call, delegatecall, staticcall or callcode",
        nullable=True,
        proven=False,
    ),
    Column("action_reward_type", Kind.TEXT, "block or uncle", nullable=True, proven=False),
    Column("action_from", _BYTES, "caller; the contract that destroyed itself", nullable=True, proven=False),
    Column("action_to", _BYTES, "callee; who got the balance or the reward", nullable=True, proven=False),
    Column("action_value", _UINT256, "wei sent, left or rewarded", nullable=True, proven=False),
    Column("action_gas", _INTEGER, "gas given", nullable=True, proven=False),
    Column("action_input", _BYTES, "call data", nullable=True, proven=False),
    Column("action_init", _BYTES, "code that makes the contract", nullable=True, proven=False),
    Column("result_gas_used", _INTEGER, "gas used", nullable=True, proven=False),
    Column("result_output", _BYTES, "what the call returned", nullable=True, proven=False),
    Column("result_code", _BYTES, "the contract's code", nullable=True, proven=False),
    Column("result_address", _BYTES, "the contract's address", nullable=True, proven=False),
    Column("error", Kind.TEXT, "why it failed", nullable=True, proven=False),
)
