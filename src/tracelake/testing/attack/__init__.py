"""``make attack``: hostile operators, functions, SQL, DAG files and neighbours against a running stack.

    attack.py         what an attack is, and the table of what became of each
    stack.py          the stack, its victims, and how hostile code is brought to run on it
    hostile.py        the operators that run it, in the workers
    operators.py      trusted with their inputs and staging places, and with nothing else
    functions.py      trusted with nothing
    sql.py            SELECTs for sql_transform and for the Query Service
    dags.py           DAG files, triggers and bundles of somebody with a user token
    http.py           whoever reaches a port
    neighbours.py     processes of other users of the machine
    installation.py   a second Dispatcher, folders and sizes that people choose

Each attack is carried through to its effect: the row that changed, the file that was read, the request that wasn't
answered. It returns ``held`` with the refusal that it met, or ``broken`` with what it reached.
"""
