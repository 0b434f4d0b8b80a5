//! Counts and requests that a hostile front writes into its ring.

use super::*;

/// Writes `req_prod` into a ring of 32 of which ten requests were taken and four answered, and
/// returns the fault of the ring, if there is one.
fn after_req_prod(base: u32, ahead: u32) -> Option<QueueError> {
    let rig = Rig::new(Abi::X86_64, 0);
    let (mut front, mut back) = rig.halves(base);
    let mut requests = Requests::new();
    for id in 0..10 {
        assert!(front.add(&request(Abi::X86_64, id)));
    }
    front.publish();
    assert_eq!(back.pop_batch(&mut requests, 10), 10);
    let mut held = Vec::new();
    for index in 0..10 {
        let (chain, _) = requests.take(index).unwrap();
        if index < 4 { back.push_response(chain, response(0)) } else { held.push(chain) }
    }
    back.publish();
    rig.words.store_u32(REQ_PROD, base.wrapping_add(10).wrapping_add(ahead));
    let popped = back.pop_batch(&mut requests, BATCH_CHAINS);
    for index in 0..popped {
        held.push(requests.take(index).unwrap().0);
    }
    let fault = back.fault();
    if fault.is_some() {
        assert_eq!(popped, 0);
        // The front puts everything right again: a broken ring stays broken.
        rig.words.store_u32(REQ_PROD, base.wrapping_add(11));
        assert!(!back.has_available() && !back.enable_notifications());
        assert_eq!(back.pop_batch(&mut requests, BATCH_CHAINS), 0);
        assert_eq!(back.fault(), fault);
    }
    held.into_iter().for_each(|chain| back.discard(chain));
    fault
}

#[test]
fn req_prod_that_jumps_ahead_or_back_breaks_the_ring() {
    for base in [0, 5, u32::MAX - 12, u32::MAX] {
        // Six are taken and not answered: there is room for 26 more.
        assert_eq!(after_req_prod(base, 26), None);
        for ahead in [27, 32, 33, 0x7fff_ffff, 0x8000_0000, u32::MAX - 9, u32::MAX] {
            let (req_cons, rsp_prod) = (base.wrapping_add(10), base.wrapping_add(4));
            let req_prod = req_cons.wrapping_add(ahead);
            let fault = QueueError::ReqProd { req_prod, req_cons, rsp_prod, size: 32 };
            assert_eq!(after_req_prod(base, ahead), Some(fault));
        }
    }
    let fault = after_req_prod(0, 90).unwrap().to_string();
    let text = "req_prod is 100 in a ring of 32: 10 requests were taken, 4 answered";
    assert_eq!(fault, text);
}

#[test]
fn requests_that_were_given_up_are_not_room_for_new_ones() {
    let (rig, _front, mut back, mut requests) = full_ring();
    for index in 0..32 {
        let (chain, _) = requests.take(index).unwrap();
        back.discard(chain);
    }
    rig.words.store_u32(REQ_PROD, 33);
    assert!(!back.has_available());
    assert!(matches!(back.fault(), Some(QueueError::ReqProd { req_prod: 33, .. })));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    /// A front that writes anything anywhere: the back takes no more than the ring holds, and its
    /// tokens stay different.
    #[test]
    fn scribbled_ring_is_served_or_broken_and_never_more(
        abi in prop::sample::select(Abi::ALL.to_vec()),
        base in prop_oneof![Just(0_u32), Just(u32::MAX - 3)],
        rounds in prop::collection::vec(
            (any::<prop::sample::Index>(), any::<u32>(), 0..40_u32, 0..4_usize), 1..60
        ),
    ) {
        let rig = Rig::new(abi, 0);
        let (_, mut back) = rig.halves(base);
        let (mut requests, mut held) = (Requests::new(), VecDeque::new());
        let mut prod = base;
        for (place, value, ahead, answers) in rounds {
            rig.words.store_u32(4 * place.index(PAGE_SIZE / 4), value);
            // Counts that move by small steps break the ring late.
            prod = prod.wrapping_add(ahead);
            rig.words.store_u32(REQ_PROD, prod);
            let popped = back.pop_batch(&mut requests, BATCH_CHAINS);
            prop_assert!(popped + held.len() <= usize::from(back.size()));
            for index in 0..popped {
                let (chain, copied) = requests.take(index).unwrap();
                prop_assert!(copied.words().len() <= ENTRY_WORDS);
                held.push_back(chain);
            }
            let mut slots: Vec<u16> = held.iter().map(Chain::slot).collect();
            slots.sort_unstable();
            slots.dedup();
            prop_assert_eq!(slots.len(), held.len());
            for chain in held.drain(..answers.min(held.len())) {
                back.push_response(chain, response(0));
            }
            back.publish();
            back.needs_notification();
            back.enable_notifications();
        }
        held.into_iter().for_each(|chain| back.discard(chain));
    }
}
