//! Every time of the daemon. A comment says what the time bounds; "Over" says what happens when
//! the time is over. Times of a session or a queue are in the crates that run them.

use std::time::Duration;

// Commands of the client, beside the five seconds for any answer.

/// Answer of the daemon to a command. Over: the command fails.
pub const CLIENT_ANSWER: Duration = Duration::from_secs(5);
/// Delay before a daemon without a free place for clients is asked again.
pub const CLIENT_RETRY: Duration = Duration::from_millis(50);
/// Further time for the answer while a device is opened and closed. Over: the command fails, the
/// change may still be carried out.
pub const CLIENT_OPEN: Duration = Duration::from_secs(25);
/// The same for all devices of a configuration.
pub const CLIENT_OPEN_ALL: Duration = Duration::from_secs(115);
/// The same for changes that open nothing.
pub const CLIENT_AT_ONCE: Duration = Duration::ZERO;
/// The same for a resize: ten seconds for requests in flight, and a slow host that changes a large
/// file.
pub const CLIENT_RESIZE: Duration = Duration::from_secs(25);

// Control sockets and the API.

/// The host makes a control socket at the start. Over: the start goes on, and the socket listens
/// later.
pub const CONTROL_LISTEN: Duration = Duration::from_secs(5);
/// Delay before the name of a control socket that another process has is tried again.
pub const CONTROL_LISTEN_RETRY: Duration = Duration::from_millis(200);
/// The kernel tells the name of a client's program, which the log shows. Over: the log shows none.
pub const CLIENT_NAME: Duration = Duration::from_millis(20);
/// The head of a request, and the gap between two requests. Over: the connection is closed.
pub const HTTP_HEADER: Duration = Duration::from_secs(5);
/// A client reads a whole answer. Over: the connection is closed.
pub const HTTP_ANSWER: Duration = Duration::from_secs(30);
/// The whole body of a request arrives. Over: the request is refused.
pub const HTTP_BODY: Duration = Duration::from_secs(10);
/// A client waits for an event. Over: it gets an empty list, and asks again.
pub const EVENTS_WAIT: Duration = Duration::from_secs(25);
/// A user whose refused requests were logged may have one more line.
pub const REFUSAL_LINE_EACH: Duration = Duration::from_secs(5);
/// Delay before a scraper, or the address, is tried again.
pub const SCRAPE_RETRY: Duration = Duration::from_millis(200);

// Devices and changes.

/// All devices end with the daemon. Over: the daemon exits, the kernel kills device processes that
/// are stuck, and image locks stay until their requests have ended.
pub const DEVICES_END: Duration = Duration::from_secs(5);
/// Tasks of devices end: ten seconds for a device process to stop a device, and ten to release its
/// image. Over: that is logged, and the change goes on.
pub const TASKS_END: Duration = Duration::from_secs(25);
/// The descriptors of a device are closed, or the host looks at a plan. Over: the change is
/// refused.
pub const DEVICE_CLOSE: Duration = Duration::from_secs(10);
/// Delay between two looks whether they are closed.
pub const DEVICE_CLOSE_LOOK: Duration = Duration::from_millis(1);
/// Queues see a new limit. Over: the change is answered; a queue that moves sees the limit later.
pub const LIMIT_SEEN: Duration = Duration::from_millis(100);
/// The host opens one device, or makes its socket, at the start or in a change. Over: the start or
/// the change goes on, and the device waits.
pub const DEVICE_OPEN: Duration = Duration::from_secs(1);
/// The same for all slow devices together.
pub const DEVICES_OPEN: Duration = Duration::from_secs(5);
/// The same for each device after that.
pub const DEVICE_OPEN_MIN: Duration = Duration::from_millis(20);
/// First and longest back-off before a device that waits is tried again.
pub const DEVICE_BACKOFF: (Duration, Duration) =
    (Duration::from_millis(20), Duration::from_secs(1));
/// A killed process releases an image, tap or socket, at the start or in a change. Over: the device
/// is shown as waiting.
pub const DEVICE_HELD: Duration = Duration::from_millis(500);

// Disks behind helpers and NBD servers.

/// A server answers a request. Over: the connection counts as dead, and another one is made.
pub const NBD_REQUEST: Duration = Duration::from_secs(30);
/// The host connects to a server, and the server negotiates. Over: that has failed, and is tried
/// again.
pub const NBD_CONNECT: Duration = Duration::from_secs(5);
/// The supervisor connects once in this time for a disk of a device process that asks without end.
pub const NBD_CONNECT_EACH: Duration = Duration::from_millis(10);
/// A process starts, and asks a server for its export. Over: the device waits, and is tried again.
pub const NBD_MEASURE: Duration = Duration::from_secs(10);
/// What was captured of a device is written to its file when the device is handed over or goes.
/// Over: the end of the capture is lost.
pub const CAPTURE_SETTLE: Duration = Duration::from_secs(2);
/// The connections of a device are shut down when its device process no longer has the device.
/// Over: a thread goes on with the shutdown, and the device does not wait for it.
pub const NBD_SHUT: Duration = Duration::from_millis(500);
/// A helper answers a command of its monitor. Over: the command fails, and the helper is replaced.
pub const HELPER_MONITOR: Duration = Duration::from_secs(5);
/// One of the hundred steps in which the first start of a helper is waited for: five seconds. Over:
/// the helper counts as silent, and the disk is not served.
pub const HELPER_START_STEP: Duration = Duration::from_millis(50);
/// First and longest back-off before a helper is started again.
pub const HELPER_BACKOFF: (Duration, Duration) =
    (Duration::from_millis(10), Duration::from_secs(5));
/// A helper that runs this long has not failed: the back-off is the first one again.
pub const HELPER_LASTS: Duration = Duration::from_secs(10);
/// A helper ends on SIGTERM. Over: it is killed.
pub const HELPER_END: Duration = Duration::from_secs(5);
/// The next helper starts during a resize. Over: the resize fails.
pub const HELPER_NEXT: Duration = Duration::from_secs(10);

// Device processes: start and end.

/// Delay before the next warm process is started: a front-end that waits for its process needs the
/// CPU time more.
pub const WARM_DELAY: Duration = Duration::from_millis(500);
/// Warm processes start before a takeover. Over: device processes start when they are needed.
pub const WARM_START: Duration = Duration::from_secs(3);
/// First back-off before a device process that died at once is started again.
pub const START_BACKOFF: Duration = Duration::from_millis(200);
/// Longest back-off.
pub const START_BACKOFF_MAX: Duration = Duration::from_secs(5);
/// A device process that dies within this time may have died of its commands: the back-off doubles.
pub const PROCESS_BRIEF: Duration = Duration::from_secs(2);
/// The API shows the ended device process of a Xen guest. Over: it is forgotten.
pub const PROCESS_SHOWN: Duration = Duration::from_secs(60);
/// No device of a process has a front-end. Over: the process ends.
pub const PROCESS_IDLE: Duration = Duration::from_secs(60);
/// The kernel ends a killed process. Over: the process is shown as stuck, and its devices wait.
pub const PROCESS_END: Duration = Duration::from_secs(1);
/// Delay before a child that has not ended is tried to be reaped again.
pub const REAP_RETRY: Duration = Duration::from_secs(1);
/// A child that has ended is reaped, so that a message has its exit status. Over: the message does
/// without.
pub const REAP_STATUS: Duration = Duration::from_millis(100);
/// Requests in flight end after the supervisor is gone. Over: the process exits.
pub const PROCESS_QUIT: Duration = Duration::from_secs(2);
/// The last lines of a process that has ended arrive. Over: they are lost.
pub const LAST_LINES: Duration = Duration::from_millis(50);
/// The log may have one more line of a level, when more lines came at once than may.
pub const LOG_LINE_EACH: Duration = Duration::from_millis(100);
/// A process whose denied calls were logged may have one more line.
pub const DENIED_LINE_EACH: Duration = Duration::from_secs(10);

// Device processes: commands and reports.

/// A process reads commands, answers questions, and starts; the descriptors that it sent are
/// closed. Over: it is killed. An image is released before the kill, and the size of a disk known,
/// in the same time. Over: the change goes on without.
pub const PROCESS_ANSWER: Duration = Duration::from_secs(10);
/// A process writes its counters for a reader. Over: the API, the metrics and a log line call the
/// process unresponsive, its last counters are shown, and nobody waits for it before it has
/// answered. The end of all device processes waits as long for their last counters.
pub const PROCESS_COUNTERS_WAIT: Duration = Duration::from_millis(200);
/// One more report of a domain is read.
pub const REPORT_EACH: Duration = Duration::from_micros(320);
/// One more report of the sessions of a domain is sent: a quarter slower than reports are read.
pub const SESSION_REPORT_EACH: Duration = Duration::from_micros(400);
/// Delay before a message is sent again after the kernel had no room for its descriptors.
pub const CHANNEL_RETRY: Duration = Duration::from_millis(10);
/// First and longest delay before a front-end that listens is connected to again.
pub const FRONT_CONNECT: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Delay before a client, or a device process, is tried again.
pub const FRONT_RETRY: Duration = Duration::from_millis(200);
/// Delay before the uplink of a switch is started again in its device process, and before the
/// supervisor opens the queues of an interface again for a device process.
pub const UPLINK_RETRY: Duration = Duration::from_secs(1);
/// Requests in flight end before a disk becomes smaller. Over: the resize fails with EBUSY.
pub const SHRINK: Duration = Duration::from_secs(10);
/// Requests outlast their device process. Over: that is logged, and they are waited for. Where the
/// journals of a device are forgotten, its front-ends are disconnected then.
pub const RECLAIM: Duration = Duration::from_secs(1);
/// Queues of a process see a new limit. Over: a queue that moves sees it later.
pub const PROCESS_LIMIT_SEEN: Duration = Duration::from_secs(1);

// Takeover by the next daemon.

/// A device process quiesces. Over: it is killed, and its end is waited for.
pub const QUIESCE: Duration = Duration::from_secs(1);
/// The supervisor's part of a disk ends. Over: the next supervisor gets the lock mark, and waits
/// for it.
pub const HAND_OFF_DISK: Duration = Duration::from_millis(300);
/// All device processes have quiesced or ended. Over: the takeover fails; a process that the kernel
/// does not end goes to the next supervisor. A change under way, the end of the running supervisor
/// and its control socket are waited for as long.
pub const HANDOFF_END: Duration = Duration::from_secs(3);
/// The next supervisor opens everything in its plan, and takes each message. Over: the running one
/// goes on.
pub const HANDOFF_OPEN: Duration = Duration::from_secs(15);
/// Room in the socket for a last message. Over: the message is not sent.
pub const HANDOFF_LAST: Duration = Duration::from_millis(100);
/// Delay before the control socket of a daemon that may have died is looked at again.
pub const HANDOFF_LOOK: Duration = Duration::from_millis(20);
/// Disks of Xen guests stop. Over: the device processes of the others are killed. All guests pause
/// as long.
pub const XEN_QUIESCE: Duration = Duration::from_millis(800);
/// Their tasks end after that. Over: they are handed over as they are.
pub const XEN_HAND_OFF: Duration = Duration::from_millis(400);

// Xen.

/// Delay before a lost xenstore is looked for again, or a disk whose nodes could not be read.
pub const XENSTORE_RETRY: Duration = Duration::from_secs(1);
/// Requests in flight end with the daemon. Over: the daemon exits.
pub const XEN_STOP: Duration = Duration::from_secs(1);
/// Delay before the next device process is asked to serve a front-end.
pub const XEN_PROCESS_RETRY: Duration = Duration::from_millis(200);
/// Another process or disk releases a file: a guest that restarts has its new disk before the old
/// one is gone. Over: the disk is refused.
pub const XEN_FILE: Duration = Duration::from_secs(10);
/// Delay before the file is tried again.
pub const XEN_FILE_RETRY: Duration = Duration::from_millis(100);
/// A killed process releases an event channel. Over: the connection is refused.
pub const XEN_BIND: Duration = Duration::from_secs(2);
/// Delay before the event channel is tried again.
pub const XEN_BIND_RETRY: Duration = Duration::from_millis(20);
/// Longest time between two checks of the journals of Xen rings, for one that is missing, cut or
/// too long.
pub const XEN_JOURNALS_LOOK: Duration = Duration::from_secs(1);
/// Shortest time between two such checks.
pub const XEN_JOURNALS_MIN: Duration = Duration::from_millis(10);
/// A process that ends releases the locks of the disks. Over: the start fails.
pub const XEN_LOCKS: Duration = Duration::from_secs(5);
/// Delay before the locks are tried again.
pub const XEN_LOCKS_RETRY: Duration = Duration::from_millis(50);

// Log, service manager and the end of the daemon.

/// Workers end with the daemon. Over: it exits beside a call of the host that hangs.
pub const WORKERS_END: Duration = Duration::from_millis(300);
/// Sockets that a thread still makes get their names, to be removed. Over: a name stays.
pub const NAMES_END: Duration = Duration::from_secs(1);
/// The last lines are written. Over: they are lost.
pub const LOG_FINISH: Duration = Duration::from_millis(300);
/// Standard error takes the reason of a refused start. Over: the reason is lost.
pub const LOG_REFUSAL: Duration = Duration::from_secs(10);
/// A service manager reads the last message. Over: the message is lost.
pub const NOTIFY_LAST: Duration = Duration::from_secs(1);
/// Names of sockets that nobody serves are removed at the start. Over: the start goes on.
pub const SOCKETS_REMOVE: Duration = Duration::from_secs(1);
