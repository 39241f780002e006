with div as (select 1) from logs map join div x using 'id; touch @CANARY@'
with div as (select 1 a) select * from (from logs map join div x using 'touch @CANARY@')
with div as (select 1 a) from logs reduce join div x using 'touch @CANARY@'
from logs map address using 'touch @CANARY@' as (a)
select transform(address) using 'touch @CANARY@' as (a) from logs
select transform(address) row format delimited fields terminated by ',' using 'sh' as (a string) from logs
select map(address) using 'touch @CANARY@' from logs
select reduce (address) using 'touch @CANARY@' from logs
map address using 'touch @CANARY@' from logs
with t as (select transform(*) using 'touch @CANARY@' from logs) select * from t
select * from logs where value in (select transform(value) using 'cat' from logs)
select '${env:PATH}', '${system:java.version}', '${spark:spark.app.id}', "${spark.app.name}" as `${env:PATH}`
select ${env:PATH}
select `${env:PATH}` from logs
select * from parquet.`@SECRET@`
select * from `parquet`.`@SECRET@`
select * from text.`/etc/passwd`
select * from `/etc/passwd`
select * from spark_catalog.default.logs
select * from global_temp.logs
select * from session.logs
select * from 'logs'
select * from "logs"
select * from identifier('logs')
select identifier('value') from logs
select identifier('reflect')('java.lang.System', 'getenv') from logs
select * from range(10)
select * from explode(array(1))
select * from read_files('/etc/passwd')
select * from table(range(1))
select * from table(logs)
table logs
select * from logs, lateral (select 1)
select * from logs lateral view explode(array(1)) x as y
select * from logs lateral view outer explode(array(1)) x
select * from logs tablesample (10 percent)
select * from logs version as of 1
select * from logs timestamp as of '2020-01-01'
select * from logs pivot (sum(value) for address in ('a'))
select * from logs unpivot (v for k in (value))
from logs |> select value
select * from logs |> where value > 1
from logs select value
from logs insert overwrite directory '@CANARY@' using parquet select *
select /*+ broadcast(logs) */ * from logs
select /*+ repartition(1000) */ * from logs
select reflect('java.lang.System', 'getenv', 'PATH')
select java_method('java.lang.Runtime', 'getRuntime')
select try_reflect('java.lang.System', 'getenv')
select `reflect`('java.lang.System', 'getenv')
select builtin.reflect('a', 'b')
select system.builtin.reflect('a', 'b')
select input_file_name() from logs
select current_user, user() from logs
select current_catalog() from logs
select version()
select uuid(), rand(), now(), current_timestamp
select current_date from logs
select monotonically_increasing_id() from logs
select raise_error('x') from logs
select assert_true(false) from logs
select try_remote_call('x')
select ai_query('x', 'y')
select secret('a', 'b')
select http_request('x')
select from_avro(address, '{}') from logs
select aes_decrypt(address, 'k') from logs
select schema_of_json('{}'), from_csv('1', 'a INT') from logs
select :p
select ? from logs
select * from identifier(:p)
execute immediate 'select 1'
begin select 1; end
begin declare x int; set x = 1; end
declare variable x int
set spark.sql.variable.substitute=true
set -v
reset
select 1; select 2
select 1; set spark.sql.variable.substitute=true
explain select 1
explain extended select * from logs
describe logs
show tables
create temporary view logs as select 1
create temporary function abs as 'x.Y' using jar '/x.jar'
create table x using parquet location '@CANARY@' as select 1
insert into logs select 1
insert overwrite directory '@CANARY@' using csv select 1
cache table x as select 1
add jar '/tmp/x.jar'
list jars
refresh '/etc'
call system.proc()
use global_temp
drop view logs
truncate table logs
analyze table logs compute statistics
load data inpath '/etc/passwd' into table logs
merge into logs using logs on true when matched then delete
delete from logs
update logs set value = 1
comment on table logs is 'x'
select r'\', reflect('x', 'y') -- '
select R"\" , reflect('x', 'y') -- "
select 'a\' , reflect('x', 'y') -- '
select 1 /* /* */ , reflect('x', 'y') */
select 1 --\
, reflect('x', 'y')
select 1 /*! , reflect(1) */ , version() from logs
select $$a$$ from logs
select $1 from logs
select @x from logs
select `a``, reflect(1) from logs
select value:a.b from logs
select value collate UNICODE from logs
select abs(expr => 1) from logs
select * from stream logs
select * from stream(logs)
select * from logs with (x = 'y')
select * from logs for system_time as of 1
select value from logs where value > any (select 1)
select * from hive.`x`.`y`
select * from csv.`@SECRET@`, logs
with x as (select * from text.`@SECRET@`) select * from x
select (select max(value) from text.`@SECRET@`) from logs
select * from logs where value in (select value from json.`@SECRET@`)
select * from logs join other using (value)
with a as (select * from b), b as (select 1) select * from a
with recursive a as (select * from nowhere) select * from a
select * from (with z as (select 1) select * from z) join z
with reflect(a) as (select 1) select reflect('x', 'y') from reflect
select transform(array(1), x -> reflect('a', 'b')) from logs
select x(1) from (select 1 as x)
select ſum(value) from logs
select value from lоgs
select from_json('{}', '{"type":"struct","fields":[{"name":"a","type":"string","nullable":true,"metadata":{"EXISTS_DEFAULT":"\'x\'"}}]}').a
select from_json('{}', '{"type":"struct","fields":[{"name":"a","type":"string","nullable":true,"metadata":{"EXISTS_DEFAULT":"cast(from_xml(\'<a/>\',\'a INT\',map(\'rowValidationXSDPath\',\'@SECRET@\')) as string)"}}]}').a
select from_json('{}', '{"type":"struct","fields":[{"name":"a","type":{"type":"udt","class":"org.apache.spark.ml.linalg.VectorUDT","pyClass":null,"sqlType":"string"},"nullable":true,"metadata":{}}]}')
select from_json('{}', concat('a', ' INT'))
select from_json('{}', 'a INT', map('mode', 'FAILFAST'))
select to_json(struct(1 as a), map('ignoreNullFields', 'false'))
select timestamp '12:00:00'
select cast('12:00:00' as timestamp)
select * from values (timestamp '2020-01-01'), ('12:00:00')
select unix_timestamp()
