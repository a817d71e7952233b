//! Resets of the controller and of the subsystem.

use crate::common::{Folder, Place, data};

const BLOCK: usize = 4096;

in_each_place!(the_controller_works_after_a_reset,);

fn the_controller_works_after_a_reset(place: Place) {
    let folder = Folder::new(place);
    let d = "sim:mem?size=1MiB";
    for (flags, what) in [
        (&[][..], "controller reset"),
        (&["--subsystem"], "NVM subsystem reset"),
    ] {
        let text = folder.ok(&[&["reset", "-d", d], flags].concat());
        assert!(
            text.starts_with(&format!("{what}: success, ready again after ")),
            "{text}"
        );
        let object = folder.json(&[&["reset", "-d", d], flags].concat());
        assert_eq!(object["reset"], what);
    }
}

#[test]
fn a_subsystem_reset_keeps_the_data_and_the_queues_of_a_controller_in_use() {
    use nvme_host::core::spec::register::{Csts, offset};
    use nvme_host::core::spec::{Lba, Nsid};
    let (device, judge) = crate::common::embedded("sim:mem?size=1MiB");
    let controller =
        nvme_host::Controller::start(device, &nvme_host::ControllerConfig::default()).unwrap();
    let mut namespace = controller.namespace(Nsid(1)).unwrap();
    let input = data(4 * BLOCK, 3);
    namespace.write(Lba(7), &input).unwrap();
    for (round, reset) in [
        nvme_host::Controller::reset,
        nvme_host::Controller::reset_subsystem,
    ]
    .into_iter()
    .enumerate()
    {
        reset(&controller).unwrap();
        assert_eq!(controller.resets(), round as u32 + 1);
        let csts = Csts(controller.device().registers().read32(offset::CSTS));
        assert_eq!(csts.nssro(), round == 1, "NSSRO says which kind it was");
        let mut output = vec![0; 4 * BLOCK];
        namespace.read(Lba(7), &mut output).unwrap();
        assert!(output == input);
    }
    drop((namespace, controller, judge));
}
