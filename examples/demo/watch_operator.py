"""The same as ``watch.py`` for machines without a sandbox: as a trusted operator."""

from tracelake.operators import Context, operator


@operator("demo_watch")
def demo_watch(ctx: Context) -> None:
    rows = ctx.inputs[0].arrow().to_pylist()
    large = [row for row in rows if float(row["value"]) >= ctx.config["large"]]
    ctx.publish(
        "alerts",
        [
            {
                "dedupe_key": f"0x{row['transaction_hash'].hex()}:{row['log_index']}",
                "block_number": row["block_number"],
                "token": row["address"],
                "amount": row["value"],
            }
            for row in large
        ],
    )
