//! Short datagrams of many flows and many lengths, merged when they leave the guest: DNS questions
//! and answers each arrive once, whole, with their own length, in a namespace behind a veth.

use super::uml_merge_transfers::{Halt, merged_by, merging_by};
use super::uml_net_ping_and_iperf3::lost_nothing;
use super::{Behaviour, Scene};
use crate::daemon::Daemon;
use crate::guest::{Guest, GuestOptions, Kind};
use crate::net::{Capture, Frames, Namespace, Service};
use crate::{Context, Outcome, check, packages};
use std::collections::BTreeSet;
use std::time::Duration;

pub(super) const BEHAVIOUR: Behaviour = Behaviour { name: "uml_merge_dns", run };

/// A server that knows every name in `.test`: an address if asked for that, and the texts of its
/// configuration file.
const SERVER: &str = "dnsmasq --no-daemon --no-resolv --no-hosts --pid-file= --user=root \
    --address=/test/203.0.113.1";
/// A client that asks each question of its file once, from two ports, with as many questions on
/// their way as the other end's socket has room for. Three clients have six flows: the daemon joins
/// frames of eight that take turns.
const CLIENT: &str = "dnsperf -c 2 -q 32 -n 1 -t 30";

/// `count` questions; each name has its number and the length of a part of it. Some neighbours have
/// the same length, some do not.
const NAMES: &str = r#"BEGIN {
    while (length(fill) < 150) fill = fill "abcdefghijklmnopqrstuvwxyz-0123456789-abcdefghij."
    for (i = 0; i < count; i++) {
        len = 5 + int(i / 16) * 37 % 130 - (i % 9 == 8 ? 5 : 0)
        part = substr(fill, 1, len)
        sub(/\.$/, "x", part)
        printf "q%d-%d.%sz.%s.test A\n", i, len, part, server
    }
}"#;
/// Texts of the guest's server, and the questions for them.
const TEXTS: &str = r#"BEGIN {
    while (length(fill) < 255) fill = fill "0123456789-abcdefghijklmnopqrstuvwxyz"
    for (i = 0; i < count; i++) {
        len = 1 + int(i / 12) * 53 % 250
        printf "txt-record=t%d-%d.test,\"%s\"\n", i, len, substr(fill, 1, len) > records
        printf "t%d-%d.test TXT\n", i, len > questions
    }
}"#;
const NAME_COUNT: usize = 4000;
/// The questions of a server are asked in this many rounds, each begun before a halted daemon.
/// After bursts without a frame to join the daemon plans one of sixteen, and a round is two bursts.
const ROUNDS: usize = 10;
/// A round's questions that the guest has sent before the daemon runs again: half of what the
/// clients send without an answer.
const TOGETHER: usize = 48;
const TEXT_COUNT: usize = 1000;

/// Addresses of the host and of the guest, each with a server.
const HOSTS: [&str; 3] = ["192.0.2.1", "192.0.2.11", "2001:db8::1"];
const GUESTS: [&str; 3] = ["192.0.2.2", "192.0.2.12", "2001:db8::2"];

/// Asks all servers at a time, in rounds. The daemon is halted while a round begins, and runs again
/// when the guest has sent the first questions: so they wait together, whatever the CPUs do.
/// Afterwards the guest answers until it is ended.
const SCRIPT: &str = r#"
sent() {
    awk '$1 == "Udp:" && $5 ~ /^[0-9]/ { n += $5 } $1 == "Udp6OutDatagrams" { n += $2 }
        END { print n }' /proc/net/snmp /proc/net/snmp6
}
ask_all() {
    await $1-ready
    before=$(sent)
    clients=
    for server in $HOSTS; do
        $CLIENT -s $server -d /tmp/q-$server-$2 > /tmp/a-$server 2>&1 &
        clients="$clients $!"
    done
    tries=0
    while [ $(($(sent) - before)) -lt $TOGETHER ]; do
        [ $tries -lt 600 ] || fail "the first questions were not sent"
        tries=$((tries + 1))
        sleep 0.05
    done
    mark $1-begun
    wait $clients
    for server in $HOSTS; do
        grep -q "Queries completed: *$((NAME_COUNT / ROUNDS)) " /tmp/a-$server || {
            cat /tmp/a-$server
            fail "$server did not answer all questions"
        }
    done
    await $1-answered
}
ask() {
    for round in $(seq $ROUNDS); do ask_all $1-$round $round; done
}
for server in $HOSTS; do
    awk -v count=$NAME_COUNT -v server=$(echo $server | tr .: --) "$NAMES" > /tmp/q-$server
    for round in $(seq $ROUNDS); do
        awk -v rounds=$ROUNDS -v round=$round -v count=$NAME_COUNT \
            'int((NR - 1) / (count / rounds)) == round - 1' /tmp/q-$server > /tmp/q-$server-$round
    done
done
network
must ip addr add 192.0.2.12/24 dev eth0
for server in $HOSTS; do pings $server; done
awk -v count=$TEXT_COUNT -v records=/tmp/conf -v questions=/dev/null "$TEXTS"
$SERVER --conf-file=/tmp/conf > /tmp/server 2>&1 &
tries=0
until grep -q started /tmp/server; do
    [ $tries -lt 50 ] || fail "the server does not start: $(cat /tmp/server)"
    tries=$((tries + 1))
    sleep 0.1
done
await asks
ask cable
ask uncut
"#;

/// The cable's near end.
const SLOW_LINK: &str = "tc qdisc add dev port0 root tbf rate 5mbit burst 4k latency 2s";
const SLOWER_LINK: &str = "tc qdisc replace dev port0 root tbf rate 1mbit burst 4k latency 2s";
const LIMIT: Duration = Duration::from_secs(180);
/// How long the daemon runs between two halts, in turn. The guest asks once for each answer, and
/// answers once for each question, so frames gather only if a halt begins before the guest has
/// dealt with what has reached it: hence the short run. The long one is there to get on.
const RUNS: [Duration; 2] = [Duration::from_millis(1), Duration::from_millis(30)];

fn run(scene: &Scene<'_>) -> Outcome {
    packages::need("questions and answers", &["dnsperf", "dnsmasq-base"])?;
    let near = Namespace::new()?;
    let far = near.beside()?;
    near.bridge_to(&far, 1500)?;
    far.run("ip address add 192.0.2.11/24 dev far0")?;
    // A slow link, and little room before it, so that a question is long on its way.
    near.run(SLOW_LINK)?;
    let arguments = ["--tap", "tap0", "--bridge", "br0", "--sndbuf", "16384"];
    let daemon = scene.serve_net(&near, &arguments)?;
    near.run("ip link set tap0 up")?;
    let log = scene.log("dnsmasq.log");
    let mut server = shell(&far, &format!("exec {SERVER} --conf-file=/dev/null"));
    server.env("LC_ALL", "C");
    let mut server = Service::silent(server, &log)?;
    server.until_says("started", &log)?;
    let script = format!(
        "NAME_COUNT={NAME_COUNT}\nROUNDS={ROUNDS}\nTOGETHER={TOGETHER}\n\
         TEXT_COUNT={TEXT_COUNT}\nNAMES='{NAMES}'\nTEXTS='{TEXTS}'\n\
         SERVER='{SERVER}'\nCLIENT='{CLIENT}'\nHOSTS='{}'\n{SCRIPT}",
        HOSTS.join(" ")
    );
    let programs = ["dnsmasq", "dnsperf"].as_slice();
    let options = GuestOptions { programs, script: &script, ..Default::default() };
    let mut guest = scene.boot_net(Kind::Uml, &daemon, options)?;
    guest.reach("asks", LIMIT)?;
    questions(scene, &far, &daemon, &mut guest)?;
    // The last link is the receiver itself: it is its socket that must tell datagrams apart.
    near.run("ethtool -K port0 tx on tso on gso on tx-udp-segmentation on")?;
    asks(&daemon, &mut guest, "uncut")?;
    near.run("ethtool -K port0 tx off tso off gso off tx-udp-segmentation off")?;
    // The guest takes longer for an answer than for a question.
    near.run(SLOWER_LINK)?;
    answers(scene, &far, &daemon)?;
    guest.proceed()?;
    guest.finish(LIMIT)?;
    lost_nothing(&daemon.queues()?)?;
    daemon.stop()?;
    near.holds_only(&["br0", "port0"])
}

/// The guest asks all its questions, each round of them before a halted daemon.
fn asks(daemon: &Daemon, guest: &mut Guest, name: &str) -> Outcome {
    merged_by(daemon, &format!("questions, {name}"), || {
        for round in 1..=ROUNDS {
            guest.proceed()?;
            guest.reach(&format!("{name}-{round}-ready"), LIMIT)?;
            let halt = Halt::begin(daemon)?;
            guest.proceed()?;
            guest.reach(&format!("{name}-{round}-begun"), LIMIT)?;
            drop(halt);
            guest.reach(&format!("{name}-{round}-answered"), LIMIT)?;
        }
        Ok(())
    })
}

/// The guest asks; what it asked comes out of the cable once, as it was asked.
fn questions(scene: &Scene<'_>, far: &Namespace, daemon: &Daemon, guest: &mut Guest) -> Outcome {
    let capture = capture(scene, far, "questions")?;
    asks(daemon, guest, "cable")?;
    let frames = capture.stop(NAME_COUNT * HOSTS.len())?;
    // Headers of DNS and of the question, and what a name has more than its letters.
    let own_len = |name: &str| Some(12 + name.len() + 2 + 4);
    let fields = ["dns.qry.name", "udp.length", "frame.len"];
    each_once(&frames, "question", &fields, NAME_COUNT * HOSTS.len(), own_len)
}

/// The guest answers; the same of its answers.
fn answers(scene: &Scene<'_>, far: &Namespace, daemon: &Daemon) -> Outcome {
    let capture = capture(scene, far, "answers")?;
    let (count, file) = (TEXT_COUNT, scene.file("questions"));
    let script = format!(
        "awk -v count={count} -v records=/dev/null -v questions={} '{TEXTS}'",
        file.display()
    );
    check(shell(far, &script).status().context("awk")?.success(), || "awk failed".into())?;
    merging_by(daemon, "answers", &RUNS, || {
        let asking = GUESTS.map(|address| {
            let log = scene.log(&format!("dnsperf-{address}.log"));
            let words = format!("exec {CLIENT} -c 1 -s {address} -d {}", file.display());
            Service::silent(shell(far, &words), &log).map(|service| (service, log))
        });
        for asking in asking {
            let (mut service, log) = asking?;
            service.until_says(&format!("Queries completed:    {count} "), &log)?;
        }
        Ok(())
    })?;
    let frames = capture.stop(count * GUESTS.len())?;
    // As a question, and the answer's header and text; its length is the second part of the name.
    let own_len = |name: &str| {
        let text: usize = name.strip_suffix(".test")?.split_once('-')?.1.parse().ok()?;
        Some(12 + name.len() + 2 + 4 + 2 + 10 + 1 + text)
    };
    let fields = ["dns.qry.name", "udp.length", "frame.len", "ip.src", "ipv6.src"];
    each_once(&frames, "answer", &fields, count * GUESTS.len(), own_len)
}

/// A capture of what comes out of the cable.
fn capture(scene: &Scene<'_>, far: &Namespace, name: &str) -> Outcome<Capture> {
    let file = scene.log(&format!("{name}.pcap"));
    let capture = Capture::start(far, "far0", "inbound and (udp port 53 or icmp)", &file)?;
    let ping = format!("busybox ping -c 1 -W 1 {}", GUESTS[0]);
    capture.until_it_sees(|| far.run(&ping).map(|_| ()))?;
    Ok(capture)
}

/// A shell in a namespace that ends with us.
fn shell(namespace: &Namespace, script: &str) -> std::process::Command {
    let mut command = namespace.child("sh");
    command.args(["-c", script]);
    command
}

/// Checks that each datagram came once, `count` in all, with the length that its name says and a
/// right checksum. The first of `fields` is the name; then come the lengths of datagram and frame.
fn each_once(
    frames: &Frames,
    what: &str,
    fields: &[&str],
    count: usize,
    own_len: impl Fn(&str) -> Option<usize>,
) -> Outcome {
    frames.are_right(what, "dns && udp.checksum.status == 1", count)?;
    let odd = "_ws.malformed || !(dns || icmp) || ip.flags.mf == 1 || ip.frag_offset > 0";
    let odd = frames.count(odd)?;
    check(odd == 0, || format!("{what}: {odd} frames are none"))?;
    let lines = frames.fields("dns", fields)?;
    check(lines.len() == count, || format!("{} {what}s came, not {count}", lines.len()))?;
    let mut seen = BTreeSet::new();
    for line in &lines {
        let mut words = line.split('\t');
        let name = words.next().unwrap_or_default();
        let mut number = || words.next().and_then(|word| word.parse::<usize>().ok());
        let (udp, frame) = (number(), number());
        let expected = own_len(name).map(|len| len + 8);
        check(udp.is_some() && udp == expected, || format!("{what} of {expected:?}: {line}"))?;
        let rest: Vec<_> = words.filter(|word| !word.is_empty()).collect();
        let ip = frame.zip(udp).map(|(frame, udp)| frame - udp);
        check(ip == Some(34) || ip == Some(54), || format!("{what} with a tail: {line}"))?;
        let is_new = seen.insert((name.to_owned(), rest.concat()));
        check(is_new, || format!("{what} twice: {line}"))?;
    }
    Ok(())
}
