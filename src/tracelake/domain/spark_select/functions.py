"""The Spark functions that a SELECT from a DAG may call.

They compute a value from their arguments and do nothing else: no code by name (``reflect``, ``java_method``),
no files, no catalogs, no services, no settings. Those whose result changes from run to run (``rand``,
``uuid``, ``now``) are not here either: an attempt that is repeated must give the same rows.

A function stays on this list only if Spark treats each of its arguments as a value. Spark reads the second
argument of ``from_json`` as a language: a schema in JSON names classes, and its default values are SQL that
Spark evaluates before there is a plan to check. So the reader reads that argument itself and writes it anew
(``literals``). The option maps of ``from_json`` and ``to_json`` name classes and formats; the reader allows
none. The formats of ``date_format``, ``to_char``, ``to_number`` and ``printf``, the patterns of ``regexp_*``
and ``split``, and the names of zones, units and charsets only say how a value is written, and Spark looks them
up in its own tables alone.
"""

from __future__ import annotations

_AGGREGATE = """
    any any_value approx_count_distinct approx_percentile array_agg avg bit_and bit_or bit_xor bool_and
    bool_or collect_list collect_set corr count count_if count_min_sketch covar_pop covar_samp every first
    first_value grouping grouping_id histogram_numeric kurtosis last last_value listagg max max_by mean median
    min min_by mode percentile percentile_approx percentile_cont percentile_disc regr_avgx regr_avgy
    regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy skewness some std stddev
    stddev_pop stddev_samp string_agg sum try_avg try_sum var_pop var_samp variance
"""
_WINDOW = "cume_dist dense_rank lag lead nth_value ntile percent_rank rank row_number"
_NUMBER = """
    abs acos acosh asin asinh atan atan2 atanh bit_count bit_get bround cbrt ceil ceiling cos cosh cot csc
    degrees e exp expm1 factorial floor getbit hypot isnan ln log log10 log1p log2 mod nanvl negative pi pmod
    positive pow power radians rint round sec shiftleft shiftright shiftrightunsigned sign signum sin sinh
    sqrt tan tanh try_add try_divide try_mod try_multiply try_subtract width_bucket
"""
_TEXT = """
    base64 bin btrim char chr concat concat_ws conv date_format dayname decode elt format_number format_string
    from_unixtime hex initcap lcase left lower lpad ltrim monthname overlay printf regexp_extract
    regexp_extract_all regexp_replace regexp_substr repeat replace reverse right rpad rtrim soundex space
    split split_part string substr substring substring_index to_char to_varchar translate trim ucase upper
"""
_ABOUT_TEXT = """
    ascii bit_length char_length character_length charindex contains encode endswith find_in_set instr len
    length levenshtein locate octet_length position regexp regexp_count regexp_instr regexp_like rlike
    startswith to_binary to_number try_to_binary try_to_number unbase64 unhex
"""
_TIME = """
    add_months convert_timezone date date_add date_diff date_from_unix_date date_part date_sub date_trunc
    dateadd datediff datepart day dayofmonth dayofweek dayofyear extract from_utc_timestamp hour last_day
    make_date make_interval make_timestamp make_timestamp_ltz make_timestamp_ntz minute month months_between
    next_day quarter second timestamp timestamp_add timestamp_diff timestamp_micros timestamp_millis
    timestamp_seconds timestampadd timestampdiff to_date to_timestamp to_timestamp_ltz to_timestamp_ntz
    to_unix_timestamp to_utc_timestamp trunc try_to_timestamp unix_date unix_micros unix_millis unix_seconds
    unix_timestamp weekday weekofyear year
"""
_NESTED = """
    aggregate array array_append array_compact array_contains array_distinct array_except array_insert
    array_intersect array_max array_min array_position array_prepend array_remove array_repeat array_size
    array_sort array_union arrays_overlap arrays_zip cardinality element_at exists explode explode_outer
    filter flatten forall get inline inline_outer json_array_length map map_concat map_contains_key
    map_entries map_filter map_from_arrays map_from_entries map_keys map_values map_zip_with named_struct
    posexplode posexplode_outer reduce sequence size slice sort_array stack struct transform transform_keys
    transform_values try_element_at zip_with
"""
_TEXT_IN_NESTED = """
    array_join from_json get_json_object json_object_keys json_tuple str_to_map to_json
"""
_OTHER = """
    bigint binary boolean cast coalesce crc32 decimal double equal_null float greatest hash if ifnull int
    isnotnull isnull least md5 nullif nullifzero nvl nvl2 sha sha1 sha2 smallint tinyint try_cast typeof
    xxhash64 zeroifnull
"""


def _names(*groups: str) -> frozenset[str]:
    return frozenset(name for group in groups for name in group.split())


ALLOWED = _names(_AGGREGATE, _WINDOW, _NUMBER, _TEXT, _ABOUT_TEXT, _TIME, _NESTED, _TEXT_IN_NESTED, _OTHER)
#: Their result is text, or has text in it, that need not occur in any of their arguments.
MAKES_TEXT = _names(_TEXT, _TEXT_IN_NESTED)
#: Their result is never text.
GIVES_NO_TEXT = _names(
    _NUMBER,
    _ABOUT_TEXT,
    _TIME,
    "approx_count_distinct avg bigint binary boolean count crc32 decimal double float hash int kurtosis mean median"
    " percentile percentile_cont skewness smallint std stddev sum tinyint try_avg try_sum variance xxhash64",
)
#: Their result is one of their arguments, or has the type of one.
GIVES_AN_ARGUMENT = _names(
    "any_value coalesce first first_value greatest if ifnull lag last last_value lead least max max_by min min_by"
    " mode nth_value nullif nvl nvl2"
)
