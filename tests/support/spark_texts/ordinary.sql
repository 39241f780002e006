select block_number, count(*) as logs from logs group by block_number
select s.block_number, coalesce(sum(value), 0) t from scope_blocks s left join logs using (block_number) group by 1
select logs.* except (address) from logs
select distinct address a, value v from logs where value between 1 and 20 and address in ('a', "b") or not value is null
select * from logs where address like 'a%' escape '!' or address rlike '^a.*$' and address ilike any ('A%', 'b')
select a.block_number from logs a join logs b on a.value <> b.value left semi join scope_blocks using (block_number)
select * from logs natural join scope_blocks
select * from logs a cross join scope_blocks b, scope_blocks c where a.block_number = b.block_number
select * from (logs a join scope_blocks b on a.block_number = b.block_number)
select * from ((select 1 as x) a join scope_blocks b on a.x = b.block_number)
with t as (select block_number, sum(value) n from logs group by 1), u(a, b) as (select * from t) select max(b) from u
with logs as (select * from logs) select * from logs order by value desc nulls last limit 5 offset 1
with recursive r(n) as (values (1) union all select n + 1 from r where n < 3) select n from r
select block_number from logs union all select block_number from scope_blocks union select 1 except select 2
select 1 union select 2 intersect select 3 union all (select 4 order by 1 limit 1)
select row_number() over (partition by address order by value desc), lag(value, 1) over w from logs window w as (order by value)
select sum(value) over (order by block_number rows between 2 preceding and current row) s from logs
select block_number from logs qualify row_number() over (partition by address order by block_number) = 1
select cast(value as decimal(38, 0)) d, value::double, try_cast(address as int), cast(null as array<struct<a: int>>) from logs
select case when value > 10 then 'big' else 'small' end, case address when 'a' then 1 end, if(value > 1, 1, 0) from logs
select date '2020-01-01', timestamp'2020-01-01 00:00:00', interval '1' day, interval 1 day 2 hours, x'1F' from logs
select dateadd(day, 1, date '2020-01-01'), extract(year from date '2020-01-01'), date_add(date '2020-01-01', 1) from logs
select substring(address from 1 for 2), trim(both 'a' from address), position('a' in address) from logs
select transform(array(1, 2), x -> x + value), aggregate(array(1), 0, (acc, x) -> acc + x), map('a', 1)['a'] from logs
select named_struct('a', 1).a, struct(value as v, address).v, exists(array(1), x -> x = 1), array(1, 2)[0] from logs
select posexplode(array(1, 2)) as (p, q) from logs
select count(distinct address, value), sum(value) filter (where value > 10), max_by(address, value) from logs
select listagg(address, ',') within group (order by address), percentile_cont(0.5) within group (order by value) from logs
select address, block_number, grouping_id(), sum(value) from logs group by cube (address, block_number)
select address, sum(value) from logs group by grouping sets ((address, block_number), (address), ())
select * from logs where exists (select 1 from scope_blocks s where s.block_number = logs.block_number)
select * from logs where value > (select avg(value) from logs) and (address, value) in (select address, value from logs)
select ((select max(value) from logs) + 1) * 2, value - -3 - - 3, ~value, value div 2, value & 1 | 2 ^ 3 from logs
select value << 1, value >> 1, value >>> 2, 'a' || 'b', not value = 1, !true, value <=> null, 1.5BD, -9223372036854775808 from logs
select value as `odd name`, 'it''s', "say ""hi""", 'tab\there', '\u0041 é', 'a\%b\_c\\d\'e', 'x' 'y' "z" from logs
select * from (values (1, 'a'), (2, 'b')) as t(id, name) join logs on t.id = logs.block_number
select cast(block_number as timestamp), date_trunc('day', cast(block_number as timestamp)) > '2020-01-01', lower('0xAB') = address from logs
select value as timestamp, address as date, 1 as start from logs order by date
select start, end from (select 1 as start, 2 as `end`) x
select from_json('{"a":1}', 'STRUCT < `a` INT >').a, to_json(struct(value, address)), split(address, '\n'), 'Transfer(address,address,uint256)' from logs
select value /* a comment ' */ as v -- and "another
 from logs;
select * from logs distribute by address sort by value
select * from logs cluster by value
select sum(value) over (distribute by address sort by value) from logs
select offset, limit, full, window, x.group, x.from from (select 1 as offset, 2 as limit, 3 as full, 4 as window, 5 as group, 6 as from) x
select "a" "b' , reflect(1) -- "
