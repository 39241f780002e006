"""The Spark functions that a SELECT from a DAG may call.

They compute a value from their arguments and do nothing else: no code by name (``reflect``, ``java_method``), no
files, no catalogs, no services, no settings. Those whose result changes from run to run (``rand``, ``uuid``,
``now``) are not here either: an attempt that is repeated must give the same rows.
"""

from __future__ import annotations

_AGGREGATE = """
    any any_value approx_count_distinct approx_percentile array_agg avg bit_and bit_or bit_xor bool_and bool_or
    collect_list collect_set corr count count_if count_min_sketch covar_pop covar_samp every first first_value
    grouping grouping_id histogram_numeric kurtosis last last_value listagg max max_by mean median min min_by mode
    percentile percentile_approx percentile_cont percentile_disc regr_avgx regr_avgy regr_count regr_intercept
    regr_r2 regr_slope regr_sxx regr_sxy regr_syy skewness some std stddev stddev_pop stddev_samp string_agg sum
    try_avg try_sum var_pop var_samp variance
"""
_WINDOW = "cume_dist dense_rank lag lead nth_value ntile percent_rank rank row_number"
_NUMBER = """
    abs acos acosh asin asinh atan atan2 atanh bin bit_count bit_get bround cbrt ceil ceiling conv cos cosh cot csc
    degrees e exp expm1 factorial floor getbit greatest hypot isnan least ln log log10 log1p log2 mod nanvl negative
    pi pmod positive pow power radians rint round sec shiftleft shiftright shiftrightunsigned sign signum sin sinh
    sqrt tan tanh try_add try_divide try_mod try_multiply try_subtract width_bucket
"""
_TEXT = """
    ascii base64 bit_length btrim char char_length character_length charindex chr concat concat_ws contains decode
    elt encode endswith find_in_set format_number format_string hex initcap instr lcase left len length levenshtein
    locate lower lpad ltrim octet_length overlay position printf regexp regexp_count regexp_extract
    regexp_extract_all regexp_instr regexp_like regexp_replace regexp_substr repeat replace reverse right rlike rpad
    rtrim soundex space split split_part startswith substr substring substring_index to_binary to_char to_number
    to_varchar translate trim try_to_binary try_to_number ucase unbase64 unhex upper
"""
_TIME = """
    add_months convert_timezone date date_add date_diff date_format date_from_unix_date date_part date_sub
    date_trunc dateadd datediff datepart day dayname dayofmonth dayofweek dayofyear extract from_unixtime
    from_utc_timestamp hour last_day make_date make_interval make_timestamp make_timestamp_ltz make_timestamp_ntz
    minute month monthname months_between next_day quarter second timestamp timestamp_add timestamp_diff
    timestamp_micros timestamp_millis timestamp_seconds timestampadd timestampdiff to_date to_timestamp
    to_timestamp_ltz to_timestamp_ntz to_unix_timestamp to_utc_timestamp trunc try_to_timestamp unix_date
    unix_micros unix_millis unix_seconds unix_timestamp weekday weekofyear year
"""
_NESTED = """
    aggregate array array_append array_compact array_contains array_distinct array_except array_insert
    array_intersect array_join array_max array_min array_position array_prepend array_remove array_repeat array_size
    array_sort array_union arrays_overlap arrays_zip cardinality element_at exists explode explode_outer filter
    flatten forall from_json get get_json_object inline inline_outer json_array_length json_object_keys json_tuple
    map map_concat map_contains_key map_entries map_filter map_from_arrays map_from_entries map_keys map_values
    map_zip_with named_struct posexplode posexplode_outer reduce sequence size slice sort_array stack str_to_map
    struct to_json transform transform_keys transform_values try_element_at zip_with
"""
_OTHER = """
    bigint binary boolean cast coalesce crc32 decimal double equal_null float hash if ifnull int isnotnull isnull
    md5 nullif nullifzero nvl nvl2 sha sha1 sha2 smallint string tinyint try_cast typeof xxhash64 zeroifnull
"""

ALLOWED = frozenset(
    name for group in (_AGGREGATE, _WINDOW, _NUMBER, _TEXT, _TIME, _NESTED, _OTHER) for name in group.split()
)
